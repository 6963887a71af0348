"""Invariance: whether a row's numbers depend on the rows beside it, measured on this processor.

The library writes every sum in one order, but a compiler may round the sums of some numbers of rows otherwise, or make
a mistake. So products are measured once per compiled library and processor, and a layer of the model at each load. No
clock decides anything here.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import addressof, byref
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.native.formats import WeightFormat, formats
from specdec.native.library import digest_of_library, features, library, own_folder, read_own
from specdec.native.types import CODE_BYTES, CODES, PAIR, PANEL, CPart, CProduct, Kind
from specdec.settings.files import cache_folder, parse_json, replacing

__all__ = ["layer_varies", "products_vary"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_ROWS = 33  # twice the rows of the largest tile, and one more
_CROWD = 97  # rows of a chunk of a prompt, whose weights are decoded once for several groups of rows
_INPUTS, _OUTPUTS = 512, 70  # several stretches of inputs; three panels, of which the last is not full
_BROKEN = 5  # a row that holds an infinity, which must not spread
_NAMED = 3  # weights that a reason names at most

WHOLE, APART = (17,), (7, 7, 1, 1, 1)
"""Rows of the blocks in which a layer runs a chain, at once and in parts."""


class _Case(NamedTuple):
    """A weight of random numbers, and the arrays that its description points into."""

    name: str
    product: CProduct
    held: Sequence[Any]


@cache
def products_vary() -> str | None:
    """Why a row of a product depends on the rows beside it, or None.

    It is measured once per library and processor, and kept beside the library. Where it cannot be kept, or what is kept
    is broken, it is measured anew, in about a second.
    """
    if library() is None:
        return None
    try:
        file = own_folder(cache_folder() / "native") / f"rows-{_conditions()}.json"
    except OSError:  # there is no folder that is the user's alone, which the library has warned of
        return _reason(_varying())
    try:
        names = _read(file)
    except (OSError, ValueError):
        names = _varying()
        with suppress(OSError), replacing(file) as new:
            new.touch(mode=0o600)
            new.write_text(json.dumps(names), encoding="utf-8")
    return _reason(names)


def layer_varies(run: Callable[[Sequence[int]], torch.Tensor]) -> str | None:
    """Why a row of a layer depends on the rows beside it, or None.

    ``run`` returns [N, D] of chains of 17 rows, the same at each call. Its argument gives the rows of each block.
    """
    whole, apart = run(WHOLE), run(APART)
    if torch.equal(whole.nan_to_num(), apart.nan_to_num()):
        return None
    return "a layer rounds a row otherwise in a block of 17 rows than in blocks of 7 or of 1"


def _conditions() -> str:
    """A hash of the library, the processor and this measurement."""
    made_of = (str(digest_of_library()), platform.machine(), *features(), Path(__file__).read_text(encoding="utf-8"))
    return hashlib.sha256("|".join(made_of).encode()).hexdigest()[:16]


def _read(file: Path) -> list[str]:
    """The names that were kept.

    Raises:
        OSError: there is no such file of the user's own.
        ValueError: it holds something else.
    """
    names = parse_json(read_own(file))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("no list of names")
    return names


def _reason(names: Sequence[str]) -> str | None:
    if not names:
        return None
    more = f" and {len(names) - _NAMED} more kinds of weights" if len(names) > _NAMED else ""
    return f"this library's products round a row otherwise beside other rows, with {', '.join(names[:_NAMED])}{more}"


def _varying() -> list[str]:
    """Names of the weights whose products round a row otherwise beside other rows."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((_ROWS, _INPUTS), np.float32)
    rows[_BROKEN, 40] = np.inf
    onto = random.standard_normal((_ROWS, _OUTPUTS), np.float32)
    return [case.name for case in _cases(random) if any(_differs(case.product, rows, to) for to in (None, onto))]


def _differs(product: CProduct, rows: Floats, onto: Floats | None) -> bool:
    """Whether some row's product differs from that of the row alone, in any bit, where more rows are multiplied.

    A row stands at one place among up to 33 rows, and at several among 97.
    """
    alone = np.concatenate([_multiplied(product, rows, onto, slice(row, row + 1)) for row in range(_ROWS)])
    for count in (*range(2, _ROWS + 1), _CROWD):
        which = np.arange(count) % _ROWS
        together, expected = _multiplied(product, rows, onto, which), alone[which]
        same = together.view(np.int32) == expected.view(np.int32)
        if not (same | (np.isnan(together) & np.isnan(expected))).all():
            return True
    return False


def _multiplied(product: CProduct, rows: Floats, onto: Floats | None, which: Any) -> Floats:
    """[R, outputs] the product of some rows, in float32 on one thread, which starts no other ones."""
    rows = np.ascontiguousarray(rows[which])
    onto = None if onto is None else np.ascontiguousarray(onto[which])
    found = np.empty((len(rows), product.outputs), np.float32)
    added = None if onto is None else onto.ctypes.data
    library().specdec_product(byref(product), rows.ctypes.data, added, found.ctypes.data, len(rows), False, 1)
    return found


def _cases(random: np.random.Generator) -> Iterator[_Case]:
    """A weight of each kind and format that this library multiplies on this processor."""
    loaded = library()
    pairs, codes = bool(loaded.specdec_pairs()), bool(loaded.specdec_codes())
    for kind, has in (
        (Kind.FULL, True),
        (Kind.HALF, True),
        (Kind.FLOAT16, True),
        (Kind.PAIRS, pairs),
        (Kind.CODED, codes),
        (Kind.CODED_PAIRS, pairs and codes),
    ):
        for tiles in range(1 + bool(loaded.specdec_tiles() and kind >= Kind.PAIRS)) if has else ():
            yield _dense(random, kind, tiles)
    for one in formats().values():
        panels = _panels(random, one)
        in_integers = (Kind.QUANTISED, Kind.INT8_QUANTISED) if one.has_integers else ()
        for kind in (Kind.EXACT_QUANTISED, *in_integers):
            yield _in_blocks(one, kind, panels)


def _dense(random: np.random.Generator, kind: Kind, tiles: int) -> _Case:
    """Random panels of float32, float16 or bfloat16, which may be coded; a few weights have no code."""
    panels = -(-_OUTPUTS // PAIR) * PAIR // PANEL
    product = CProduct(inputs=_INPUTS, outputs=_OUTPUTS, kind=kind, tiles=tiles)
    bias = random.standard_normal(_OUTPUTS, np.float32)
    weight: npt.NDArray[Any] = random.standard_normal((panels, _INPUTS, PANEL), np.float32)
    held: list[Any] = [bias]
    if kind in (Kind.CODED, Kind.CODED_PAIRS):
        weight = random.integers(0, 256, (panels, _INPUTS // 2 * CODE_BYTES), np.uint8)
        # A sign and an exponent of about one; the first code stands for zero.
        highs = np.array([0, *range(0x3A, 0x41), *range(0xB9, 0xC1)], np.uint8)
        assert len(highs) == CODES
        odd = np.zeros(panels, [("output", np.int32), ("input", np.int32), ("value", np.float32)])
        odd["output"], odd["input"], odd["value"] = np.arange(panels) * PANEL + 3, 77, 1.5
        ends = np.arange(1, panels + 1)
        product.highs, product.odd, product.odd_end = highs.ctypes.data, odd.ctypes.data, ends.ctypes.data
        held += [highs, odd, ends]
    elif kind is Kind.FLOAT16:
        weight = weight.astype(np.float16)
    elif kind is not Kind.FULL:
        weight = (weight.view(np.uint32) >> 16).astype(np.uint16)
    product.weight, product.bias = weight.ctypes.data, bias.ctypes.data
    return _Case(f"{kind.name.lower()} weights{' by tiles' if tiles else ''}", product, [*held, weight])


def _panels(random: np.random.Generator, one: WeightFormat) -> Bytes:
    """Random panels of blocks whose scales, or float16 values, are numbers: every other byte may have any value."""
    size = library().specdec_panel_bytes
    if one.is_float16:
        values = random.standard_normal(size(one.number, _OUTPUTS, _INPUTS) // 2, np.float32)
        halves: Bytes = values.astype(np.float16).view(np.uint8)
        return halves
    panels: Bytes = random.integers(0, 256, size(one.number, _OUTPUTS, _INPUTS), np.uint8)
    blocks = panels.reshape(-1, size(one.number, PANEL, int(one.values)))
    kind, each = (np.float32, 1) if one.has_float_scales else (np.float16, 2 if one.minima else 1)
    scales = random.uniform(0.01, 0.03, (len(blocks), each * PANEL)).astype(kind).view(np.uint8)
    blocks[:, : scales.shape[1]] = scales
    return panels


def _in_blocks(one: WeightFormat, kind: Kind, panels: Bytes) -> _Case:
    part = CPart(panels.ctypes.data, one.number, _OUTPUTS, False)
    product = CProduct(inputs=_INPUTS, outputs=_OUTPUTS, kind=kind, parts=addressof(part), count=1)
    rows = {Kind.EXACT_QUANTISED: " and exact rows", Kind.INT8_QUANTISED: " and rows in bytes"}.get(kind, "")
    return _Case(f"{one.name} blocks{rows}", product, [panels, part])
