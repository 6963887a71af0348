"""The commands of ``specdec`` and their output on a terminal.

These modules import torch inside functions only, so that ``specdec --help`` starts fast.
"""
