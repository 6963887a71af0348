"""From logits to tokens: noise by position, scores, the sampler, processors, grammars, and verification of drafts.

Losslessness is decided here: a change needs a test that compares texts or distributions, by equality.
"""
