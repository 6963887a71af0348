"""Settings: options of commands, checks of values, sampling parameters, and files read and written whole.

All other folders may import it; it imports none of them, and does not import torch at its own import.
"""
