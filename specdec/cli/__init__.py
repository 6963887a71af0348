"""The commands of ``specdec``, and what they show on a terminal.

Modules here import torch only inside of functions, so that ``specdec --help`` is there at once.
"""
