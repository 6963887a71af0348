"""The engine: sequences, the scheduler that steps them, prompts, prefixes, text streams and a run's configuration.

Only this folder commits rows to a cache and tokens to a text.
"""
