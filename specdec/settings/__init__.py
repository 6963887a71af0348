"""Settings: options of commands, checks of values, sampling parameters, and files read and written whole.

All others may import from here; nothing here imports any of them, nor torch when it is imported.
"""
