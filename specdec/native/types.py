"""The interface to the compiled library: its structures, its functions' arguments and its constants."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

import numpy.typing as npt

__all__ = [
    "CODES",
    "CODE_BYTES",
    "FUNCTIONS",
    "PAIR",
    "PANEL",
    "STEP",
    "CChain",
    "CContext",
    "CCosSin",
    "CExperts",
    "CGrowing",
    "CHead",
    "CHeads",
    "CLayer",
    "CPart",
    "CProduct",
    "CRows",
    "CShape",
    "CTransitions",
    "Kind",
    "place_of",
]

PANEL, PAIR = 32, 64
"""Outputs in a panel of a weight, padded to a multiple of this number, as in ``machine.h``."""

CODES, CODE_BYTES = 16, 96
"""High bytes that have a code, and a panel's bytes for the codes and low bytes of two inputs, as in ``machine.h``."""

STEP = 32
"""Inputs of a row in one tile, as in ``machine.h``."""


class Kind(IntEnum):
    """The storage of a weight: float32; bfloat16; float16; bfloat16 in pairs of inputs, for rows rounded to it as well.

    The next two are the bfloat16 kinds with codes for high bytes. The last ones are quantised blocks, for rows
    rounded to 16-bit integers, for unrounded rows, and for rows rounded to bytes. ``specdec_kind`` in the library
    names the same kinds; a library that names others is not loaded.
    """

    FULL, HALF, FLOAT16, PAIRS, CODED, CODED_PAIRS, QUANTISED, EXACT_QUANTISED, INT8_QUANTISED = range(9)


class CPart(Structure):
    _fields_ = (("weight", c_void_p), ("format", c_int64), ("outputs", c_int64), ("as_in_file", c_int64))


class CProduct(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("highs", c_void_p),
        ("odd", c_void_p),
        ("odd_end", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("kind", c_int64),
        ("tiles", c_int64),
        ("parts", c_void_p),
        ("count", c_int64),
    )


class CExperts(Structure):
    _fields_ = (
        ("router", CProduct),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("count", c_int64),
        ("chosen", c_int64),
        ("norm_topk", c_int64),
    )


class CLayer(Structure):
    _fields_ = (
        ("qkv", CProduct),
        ("out", CProduct),
        ("gate_up", CProduct),
        ("down", CProduct),
        ("experts", c_void_p),
        ("first_norm", c_void_p),
        ("second_norm", c_void_p),
        ("head_norm", c_void_p),
        ("out_norm", c_void_p),
        ("down_norm", c_void_p),
        ("first_epsilon", c_float),
        ("second_epsilon", c_float),
        ("head_epsilon", c_float),
        ("out_epsilon", c_float),
        ("down_epsilon", c_float),
        ("scale", c_float),
        ("cap", c_float),
        ("turns", c_int32),
        ("norms_all", c_int32),
    )


class CShape(Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in ("hidden", "query_heads", "key_heads", "head_dim", "inner", "experts", "half", "gelu", "tiles")
    )


class CCosSin(Structure):
    _fields_ = (("cosines", c_void_p), ("sines", c_void_p))


class CRows(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("count", c_int64),
        ("keys", c_int64),
        ("blocks", c_void_p),
        ("turns", c_void_p),
        ("by_row", c_int64),
        ("tokens", c_void_p),
        ("embedding", c_void_p),
        ("spans", c_void_p),
        ("reads", c_void_p),
        ("parts", c_void_p),
    )


class CHead(Structure):
    _fields_ = (("product", CProduct), ("norm", c_void_p), ("epsilon", c_float))


class CHeads(Structure):
    _fields_ = (
        ("blocks", c_void_p),
        ("ends", c_void_p),
        ("layers", c_int64),
        ("heads", c_int64),
        ("size", c_int64),
        ("own", c_int64),
    )


class CChain(Structure):
    _fields_ = (
        ("shape", CShape),
        *(
            (name, c_void_p)
            for name in (
                "layer", "head", "fuse", "join", "embedding", "table", "features_norm", "embedded_norm",
                "hidden_norm", "drafted",
            )
        ),
        *((name, c_int64) for name in ("width", "features", "taps", "norms", "vocabulary", "from_norm", "final")),
        ("epsilon", c_float),
    )  # fmt: skip


class CContext(Structure):
    _fields_ = (("fuse", c_void_p), ("keyed", c_void_p), ("norm", c_void_p), ("epsilon", c_float))


class CTransitions(Structure):
    _fields_ = (
        ("size", c_int64),
        ("half", c_int64),
        *((name, c_void_p) for name in ("drafted", "apart", "chances", "likely", "before", "after", "chance")),
        *((name, c_int64) for name in ("width", "rank", "vocabulary")),
    )


class CGrowing(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("slots", "text", "features", "prices", "keys")),
        *((name, c_int64) for name in ("length", "rows", "most", "deepest", "branch", "width")),
        *((name, c_double) for name in ("sure", "accepted", "guesses", "level_price", "least")),
        ("temperature", c_float),
        ("divisor", c_float),
        *((name, c_int64) for name in ("size", "kept", "passes")),
        *(
            (name, c_void_p)
            for name in (
                "tokens", "parents", "first", "below", "depths", "places", "chances", "reach", "promised",
                "tree_parents", "tree_depths", "best", "level", "draft_tokens", "draft_parents", "draft_chances",
            )
        ),
        *((name, c_int64) for name in ("ran", "latest", "count")),
    )  # fmt: skip


FUNCTIONS: dict[str, list[Any]] = {
    "specdec_run_layers": [
        POINTER(CShape), c_void_p, POINTER(CRows), c_void_p, c_void_p, c_void_p, c_int64, c_int64,
        POINTER(CHead), c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p,
        c_void_p, c_void_p, c_void_p, c_int,
    ],
    "specdec_attend": [
        POINTER(CShape), POINTER(CRows), c_int64, c_void_p, c_float, c_float, c_void_p, c_void_p, c_int,
    ],
    "specdec_route": [POINTER(CExperts), c_void_p, c_int64, c_void_p],
    "specdec_product": [POINTER(CProduct), c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int],
    "specdec_guess": [POINTER(CHeads), c_void_p, c_void_p, c_int64, c_void_p, c_int, c_int],
    "specdec_look_up": [POINTER(CProduct), c_void_p, c_int64, c_void_p, c_int],
    "specdec_move": [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64],
    "specdec_top": [c_void_p, c_void_p, c_int64, c_int64, c_int, c_int64, c_void_p, c_void_p],
    "specdec_draw": [c_void_p, c_int64, c_int, c_float, c_uint64],
    "specdec_rank": [
        c_void_p, c_void_p, c_void_p, c_int64, c_double, c_uint64, c_int64, c_void_p, c_void_p,
    ],
    "specdec_chances": [
        c_void_p, c_int64, c_int64, c_int, c_float, c_float, c_void_p, c_void_p, c_int64, c_void_p, c_void_p,
    ],
    "specdec_run_chain": [
        POINTER(CChain), POINTER(CRows), c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p,
        c_void_p, c_int,
    ],
    "specdec_grow": [POINTER(CChain), c_void_p, c_int64, POINTER(CCosSin), c_int],
    "specdec_absorb": [POINTER(CShape), c_void_p, POINTER(CContext), POINTER(CRows), c_void_p, c_int],
    "specdec_grow_block": [POINTER(CTransitions), c_void_p, c_void_p, c_void_p, c_int],
    "specdec_sigmoid": [c_double],
    "specdec_count_highs": [c_void_p, c_int64, c_void_p],
    "specdec_code": [POINTER(CProduct), c_void_p, c_void_p, c_void_p, c_void_p],
    "specdec_format": [c_int],
    "specdec_panel_bytes": [c_int, c_int64, c_int64],
    "specdec_lay_blocks": [c_int, c_void_p, c_int64, c_int64, c_void_p, c_int],
    "specdec_dequantise": [c_int, c_void_p, c_int64, c_void_p, c_int],
    "specdec_kind": [c_int],
    "specdec_prefetch": [c_int64, c_int64, c_int64],
    "specdec_read": [c_void_p, c_int64, c_int, c_int, c_int],
    "specdec_multiply": [c_int, c_int, c_int64, c_int],
    "specdec_pairs": [],
    "specdec_arithmetic": [],
    "specdec_teams": [],
    "specdec_codes": [],
    "specdec_tiles": [],
}  # fmt: skip


def place_of(numbers: npt.NDArray[Any]) -> int:
    """Where an array of numbers begins in memory, which the caller keeps."""
    place: int = numbers.__array_interface__["data"][0]
    return place
