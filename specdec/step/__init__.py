"""The data of a step: the draft's tree, its rows and their mask, the KV cache, and copies to and from a device.

This folder knows no model and no drafter. Two invariants hold between steps: ``cache.length == len(tokens) - 1``, and
slots from ``cache.length`` on are scratch that only the engine commits.
"""
