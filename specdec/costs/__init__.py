"""Costs: one question per module, answered by finished steps only.

``curve``: how long does a forward of n rows take? ``measuring`` times it. ``live_curve``: how long does it take now?
``prices`` sets expected tokens against that time: do these rows pay, does a pass, does drafting? All others ask it:
drafters that choose their rows, the parts of ``auto``, and the two below, each with its own record.
``policy``: how many rows may a drafter propose that does not choose them? ``fallback``: does drafting pay at all?
"""
