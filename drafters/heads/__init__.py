"""Heads: trained drafters over a target's hidden states, as others publish them: EAGLE, DFlash, DSpark.

``formats`` are the published layouts, each a table of names, and ``layout`` reads them; ``weights`` are the modules
that they fill, ``layers`` and the ``_step`` files run them; ``eagle`` and ``dflash`` draft with them.
"""
