"""Heads: drafters with trained heads on the target's hidden states, in published formats: EAGLE, DFlash, DSpark, MTP.

``formats`` has a table of names for each published layout, and ``layout`` reads them. ``weights`` has the modules that
hold the tensors; the ``_step`` files run them; ``eagle``, ``dflash`` and ``mtp`` are the drafters.
"""
