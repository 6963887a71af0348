"""Native: decoder layers in C for CPUs, compiled at first use by the C compiler of the machine that runs them.

``layers.c`` computes, :mod:`library` compiles and loads it, and :mod:`specdec.execute.native` calls it for each step;
:mod:`specdec.runners.linear` and :mod:`specdec.runners.native_attention` call it for what layers in torch do.
"""
