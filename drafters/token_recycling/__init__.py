"""Token recycling: what the target thought of last time, as guesses.

``drafter`` proposes; ``recycled`` ranks by the noise with which the target draws.
"""
