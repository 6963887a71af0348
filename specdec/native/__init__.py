"""Native: decoder layers in C, for CPUs; compiled on the machine that runs them, at first use, by its own compiler.

``layers.c`` computes, :mod:`library` compiles and loads it; :mod:`specdec.runners.native` sends a step's rows through.
"""
