"""A step's data: the tree of a draft, its rows and what they see, the cache, and what is sent to a device.

No model and no drafter is known here. Two invariants hold between steps: ``cache.length == len(tokens) - 1``, and
slots from there on are scratch, which only the engine commits.
"""
