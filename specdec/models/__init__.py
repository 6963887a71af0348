"""Models: a decoder of transformers as a target, from loading and inspection to the check against its own logits.

A user's model is never changed. New families need a test that walks them layer by layer.
"""
