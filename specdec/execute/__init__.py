"""Executors: the ways to run a decoder that is described by a spec.

:mod:`layer` is one decoder layer in torch, for decoding and for training; :mod:`torch` runs all of them.
"""
