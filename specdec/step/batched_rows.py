"""Rows of several sequences in one forward: their blocks one after the other, without padding.

Keys and values are stored in, and read from, each block's own cache, so that a row's numbers do not depend on the
other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.step import device_copies
from specdec.step.block import Block, Rows, Shared
from specdec.step.device_copies import Later
from specdec.step.visibility import bucket

__all__ = ["Batch", "rows_of"]

_MOST_ROWS = 256  # in a graph; more are launched kernel by kernel


class Group(NamedTuple):
    """Sequences of a batch with about as many rows each, whose keys are stored and read by one launch for all of them.

    Attributes:
        arrays: of ``step``, with one more dimension: G sequences, each with K rows, the most that one of them has.
            Chains have neither ``draws`` nor ``closure``.
        rows: int64 [G x K], which of the batch's rows is at each place; any at a place that is padding.
        windows: window of each layer's attention.
    """

    arrays: dict[str, torch.Tensor]
    rows: torch.Tensor
    windows: Sequence[int | None]

    def where(self) -> dict[str, torch.Tensor]:
        """As a block's."""
        return self.arrays


class Batch(Rows):
    """Blocks of several sequences, each with its own cache, as the rows of one forward.

    Where such rows come ``again`` on a device, the arrays of ``step`` have one more dimension: sequences,
    padded to a power of two, each with its rows padded to the longest. ``spread`` [sequences x rows] is the number of
    the row at each place, and ``packed`` [T] is the place of each row.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        ends = list(accumulate(block.rows for block in blocks))
        self._parts = [(block, end - block.rows, end) for block, end in zip(blocks, ends, strict=True)]
        self.rows, self.start, self.end = ends[-1], None, max(block.end for block in blocks)
        self.backend = blocks[0].backend
        self.again, self.sent = all(block.again and block.apart for block in blocks), {}
        self._brought = not any(block.apart for block in blocks)
        if self.again:
            rows = bucket(max(block.rows for block in blocks))
            self.again = bucket(len(blocks)) * rows <= _MOST_ROWS

    def send(self) -> None:
        """Copy to the device what this batch and its blocks need there, in one copy."""
        if self._brought:
            return
        self._brought, blocks = True, [block for block, _, _ in self._parts]
        arrays, stacked = self._stacked() if self.again else {}, self.shapes
        fresh = [(number, *part) for number, part in enumerate(self._parts) if not part[0].is_sent]
        whole = len(fresh) == len(blocks)
        if whole and not stacked:  # one array for all rows, of which each block has its part
            arrays["positions"] = _positions(blocks)
            if not self.late:
                arrays["tokens"] = np.array([self.ids], dtype=np.int64)
        own = [*arrays]
        for number, block, _, _ in fresh:
            each = block.more if whole else block.arrays
            if whole and not stacked and self.late and "tokens" in block.arrays:  # beside others that a device drafted
                each = {"tokens": block.arrays["tokens"], **each}
            if not stacked:
                each = {"step": device_copies.packed(block.shapes), **each}
            for name, array in each.items() if each else ():
                arrays[f"{number} {name}"] = array
        found = device_copies.copy_in(arrays, blocks[0].device or torch.device("cpu"))
        self.sent = {name: found[name] for name in own}
        for number, block, first, _ in fresh:
            block.shared = Shared(found, number, first, stacked)

    @cached_property
    def shapes(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that kernels read, with one more dimension; empty where rows do not come again on a device."""
        blocks = [block for block, _, _ in self._parts]
        if not self.again:
            return {}
        if all(block.parents is None for block in blocks):
            shapes = _chains(blocks, self._padding)
        else:
            shapes = {name: _stacked([block.shapes[name] for block in blocks]) for name in blocks[0].shapes}
        # Kernels divide by the slots of a padded sequence, too.
        shapes["table"][len(blocks) :] = blocks[0].cache.table
        return shapes

    @property
    def _padding(self) -> _Padding:
        return _padding(tuple([block.rows for block, _, _ in self._parts]))

    def _stacked(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays for all sequences: what kernels read, and the place of each row."""
        padding = self._padding
        return {"step": device_copies.packed(self.shapes), "spread": padding.spread, "packed": padding.packed}

    @property
    def ids(self) -> Sequence[int]:
        return [token for block, _, _ in self._parts for token in block.ids]

    @property
    def late(self) -> bool:
        return Later in {type(block.ids) for block, _, _ in self._parts}

    @property
    def parts(self) -> Sequence[tuple[Block, int, int]]:
        self.send()
        return self._parts

    @property
    def tokens(self) -> torch.Tensor:
        if any(block.apart for block, _, _ in self.parts):
            if "tokens" in self.sent:
                return self.sent["tokens"]
            if self.again and not self.late:
                return self._of_step("tokens")
            return torch.cat([block.tokens for block, _, _ in self.parts], 1)
        return torch.tensor([self.ids])

    @cached_property
    def positions(self) -> torch.Tensor:
        parts = self.parts
        if "positions" in self.sent:
            return self.sent["positions"]
        if self.again and not any(block.first for block, _, _ in parts):
            return self._of_step("places")
        return torch.cat([block.positions for block, _, _ in parts], 1)

    def _of_step(self, name: str) -> torch.Tensor:
        """[1, T] of the rows, of an array of ``step`` that has them at the places ``packed``."""
        every = device_copies.views(self.sent["step"], self.shapes)[name]
        return every.reshape(-1).index_select(0, self.sent["packed"])[None]

    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        for block, first, last in self.parts:
            block.store(keys[:, :, first:last], values[:, :, first:last], layer)

    def groups(self) -> tuple[list[Group], torch.Tensor]:
        """The sequences by their number of rows, for kernels that are about to run, by one copy to the device; and
        int64 [T], the place of each row in all groups' rows, one after the other.

        Raises:
            TargetError: see :meth:`specdec.step.block.Block.check_place`.
        """
        kinds: dict[tuple[bool, int], list[tuple[Block, int]]] = {}
        for block, first, _ in self._parts:
            block.check_place()
            kinds.setdefault((block.parents is None, bucket(block.rows)), []).append((block, first))
        arrays, order = dict[str, npt.NDArray[Any]](), np.empty(self.rows, dtype=np.int64)
        made, size = list[dict[str, npt.NDArray[Any]]](), 0
        for (is_chain, most), each in kinds.items():
            blocks = [block for block, _ in each]
            made.append(_of_chains(blocks) if is_chain else _of_trees(blocks))
            most = max(block.rows for block in blocks) if is_chain else most
            rows = np.zeros((len(each), most), dtype=np.int64)
            for own, (block, first) in zip(rows, each, strict=True):
                own[: block.rows] = np.arange(first, first + block.rows)
                order[first : first + block.rows] = size + np.arange(block.rows)
                size += most
            made[-1]["rows"] = rows.reshape(-1)
            arrays |= {f"{len(made)} {name}": array for name, array in made[-1].items()}
        found = device_copies.copy_in({"order": order, **arrays}, self._parts[0][0].device or torch.device("cpu"))
        windows = [slots.window for slots in self._parts[0][0].cache.group_of]
        groups = []
        for number, names in enumerate(made, 1):
            known = {name: found[f"{number} {name}"] for name in names}
            groups.append(Group(known, known.pop("rows"), windows))
        return groups, found["order"]


def _positions(blocks: Sequence[Block]) -> npt.NDArray[np.int64]:
    """[1, T] the positions of all rows."""
    depths = [
        block.length + block.depths[row] for block in blocks for row in range(block.first, block.first + block.rows)
    ]
    return np.array([depths], dtype=np.int64)


class _Padding(NamedTuple):
    """What follows from the rows of each sequence alone, so that steps share it.

    Attributes:
        counts: [S] rows.
        fits: [S, K] whether a place is a row's, for as many places as the longest has rows, padded to a bucket.
        above: [sequences, K] of chains, see ``step`` of :class:`specdec.step.block.Block`.
        closure: [sequences, K, K] of chains, the sequences padded to a bucket.
        spread, packed: see :class:`Batch`.
    """

    counts: npt.NDArray[np.int64]
    fits: npt.NDArray[np.bool_]
    above: npt.NDArray[np.int64]
    closure: npt.NDArray[np.bool_]
    spread: npt.NDArray[np.int64]
    packed: npt.NDArray[np.int64]


@lru_cache(maxsize=256)
def _padding(counts: tuple[int, ...]) -> _Padding:
    known = np.array(counts, dtype=np.int64)
    sequences, rows = bucket(len(counts)), bucket(max(counts))
    fits = np.arange(rows) < known[:, None]
    closure = np.zeros((sequences, rows, rows), dtype=np.bool_)
    closure[: len(counts)] = np.tri(rows, dtype=np.bool_) & fits[:, :, None] & fits[:, None]
    above = np.zeros((sequences, rows), dtype=np.int64)
    above[: len(counts)] = np.maximum(np.arange(rows), 1) * fits
    packed, spread = np.flatnonzero(fits), np.zeros(sequences * rows, dtype=np.int64)
    spread[packed] = np.arange(len(packed))
    found = _Padding(known, fits, above, closure, spread, packed)
    for array in found:
        array.flags.writeable = False
    return found


def _chains(blocks: Sequence[Block], padding: _Padding) -> dict[str, npt.NDArray[Any]]:
    """The blocks' arrays, stacked and padded as by :func:`_stacked`; of chains they follow from lengths alone."""
    sequences, rows, _ = padding.closure.shape
    known = np.array([block.length + block.first for block in blocks], dtype=np.int64)
    counts, places = np.zeros((sequences, 3), dtype=np.int64), np.zeros((sequences, rows), dtype=np.int64)
    own = slice(len(blocks))
    counts[own, 0], counts[own, 2] = known, padding.counts
    places[own] = known[:, None] if rows == 1 else (known[:, None] + np.arange(rows)) * padding.fits
    table = np.empty((sequences, *blocks[0].cache.table.shape), dtype=np.int64)
    np.concatenate([block.cache.table for block in blocks], out=table[own].reshape(-1, table.shape[-1]))
    draws, tokens = np.zeros((sequences, 2), dtype=np.int64), np.zeros((sequences, rows), dtype=np.int64)
    above = padding.above.copy()
    above[own] = np.where([[block.decides] for block in blocks], above[own], 0)
    for number, block in enumerate(blocks):
        if block.probes:
            above[number, [*block.probes]] = 0
    draws[own] = [block.draws for block in blocks]
    ids = [[0] * block.rows if type(block.ids) is Later else block.ids for block in blocks]
    tokens.reshape(-1)[padding.packed] = [*chain.from_iterable(ids)]
    return {
        "counts": counts,
        "table": table,
        "draws": draws,
        "tokens": tokens,
        "above": above,
        "places": places,
        "closure": padding.closure,
    }


def _of_chains(blocks: Sequence[Block]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of chains, padded to the rows of the longest, without what a row sees: all those before it."""
    known = np.array([block.length + block.first for block in blocks], dtype=np.int64)
    rows = np.array([block.rows for block in blocks], dtype=np.int64)
    return {
        "counts": np.stack((known, np.zeros_like(rows), rows), 1),
        "table": np.stack([block.cache.table for block in blocks]),
        "places": known[:, None] + np.arange(rows.max()),
    }


def _of_trees(blocks: Sequence[Block]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of trees whose rows are of one bucket."""
    return {name: _stacked([block.shapes[name] for block in blocks])[: len(blocks)] for name in blocks[0].shapes}


def _stacked(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One array per sequence, stacked and padded with zeros, for a power of two sequences."""
    shape = np.max([array.shape for array in arrays], 0)
    stacked = np.zeros((bucket(len(arrays)), *shape), dtype=arrays[0].dtype)
    for own, array in zip(stacked, arrays, strict=False):
        own[tuple(map(slice, array.shape))] = array
    return stacked


def rows_of(blocks: Sequence[Block]) -> Rows:
    """The rows of a forward of one sequence or several."""
    return Batch(blocks) if len(blocks) > 1 else blocks[0]
