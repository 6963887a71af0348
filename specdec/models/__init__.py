"""Models as targets: :mod:`described_target` runs what a spec describes, from a checkpoint or copied from a live model;
:mod:`transformers_target` runs a live model, which is never changed, by its own forward, and loads either.
"""
