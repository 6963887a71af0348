"""Costs: one question per module, answered by finished steps only.

``curve``: how long does a forward of n rows take? ``measuring`` times it. ``live_curve``: how long does it take now?
``prices``: how many of the given rows pay? Drafters that choose their rows use it, and so do the two below.
``policy``: how many rows may a drafter propose that does not choose them? ``fallback``: does drafting pay at all?
"""
