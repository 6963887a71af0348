"""Weight formats: the quantised blocks that the compiled library reads, by the table in ``specdec/native/blocks.h``."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import POINTER, Structure, c_char_p, c_int32, c_void_p
from functools import cache
from typing import Any

from specdec.native.library import library

__all__ = ["WeightFormat", "formats"]


class WeightFormat(Structure):
    """The description of one format, a row of the table.

    Attributes:
        name, type: GGUF's name and number of it; below 0 for blocks that no GGUF file has.
        values, bytes: of a block in a file.
        bits: of a code.
        number: its place in the table.
    """

    _fields_ = (
        ("_name", c_char_p),
        *((name, c_int32) for name in ("type", "values", "bytes", "bits", "offset", "group")),
        *((name, c_int32) for name in ("scales", "minima", "levels")),
        ("_read", c_void_p),
    )
    number = 0

    @property
    def has_integers(self) -> bool:
        """Whether codes stand for integers, which products may multiply."""
        return int(self.levels) < 2  # as Lists in ``blocks.h``

    @property
    def is_float16(self) -> bool:
        """Whether it is plain float16, in which nothing is quantised."""
        return int(self.levels) == 4  # as Lists in ``blocks.h``

    @property
    def has_float_scales(self) -> bool:
        """Whether a block's scale is one float32; else it is a float16, as a minimum is."""
        return int(self.scales) == 4  # as Scales in ``blocks.h``

    @property
    def name(self) -> str:
        return str(self._name.decode())

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row of ``inputs`` weights in a file."""
        return inputs // int(self.values) * int(self.bytes)


@cache
def formats() -> Mapping[int, WeightFormat]:
    """All formats, by their types; none where there is no library."""
    loaded: Any = library()
    if loaded is None:
        return {}
    loaded.specdec_format.restype = POINTER(WeightFormat)
    found: dict[int, WeightFormat] = {}
    while pointer := loaded.specdec_format(len(found)):
        one = pointer.contents
        one.number = len(found)
        found[one.type] = one
    return found
