"""Token recycling: the target's likeliest tokens of earlier steps, as guesses.

``drafter`` proposes them; ``recycled`` ranks them with the noise that the target draws with.
"""
