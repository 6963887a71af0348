"""The data of a step: the draft's tree, a forward's input, the KV cache, and copies to and from a device.

This folder knows no model and no drafter. Two invariants hold between steps: ``cache.length == len(tokens) - 1``, and
slots from ``cache.length`` on are scratch that only the engine commits. A third holds in a step: row i of a tree is
stored at position ``cache.length + i``, and nothing else says where. So a forward may run twice.
"""
