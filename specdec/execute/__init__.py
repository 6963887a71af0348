"""Executors: the ways to run a decoder that is described by a spec, and the choice of one (:mod:`choose`).

:mod:`layer` is one decoder layer in torch, for decoding and for training; :mod:`torch` runs all of them, :mod:`native`
in one call of C, and :mod:`cuda` by Triton's kernels.
"""
