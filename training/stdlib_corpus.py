"""The corpus of :mod:`drafters.stdlib_corpus`, under the name that training knows."""

from __future__ import annotations

from drafters.stdlib_corpus import HELD_OUT_ONE_IN, is_held_out, read_files

__all__ = ["HELD_OUT_ONE_IN", "is_held_out", "read_files"]
