"""Costs: what a forward of some rows takes here and now, how many rows pay, and whether to draft at all.

Only numbers of rows follow from it, never a token: what is chosen depends on steps that are over.
"""
