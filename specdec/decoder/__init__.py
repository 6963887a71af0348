"""What a decoder is: its description, the families that are known, its rotary positions, and its weights.

A family of models is one function and one table of names (:mod:`families`, :mod:`names`); what it describes
(:mod:`spec`) is run by every executor.
"""
