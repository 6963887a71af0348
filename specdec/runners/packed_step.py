"""A step's arrays for kernels, on the host: what :mod:`specdec.runners.kernels` and recorded graphs read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.runners.rows import TextRows
from specdec.runners.visibility import bucket
from specdec.sampling.noise import inverse_bits
from specdec.step.step_io import StepInput, Walk
from specdec.step.tree import ancestors

__all__ = ["MOST_REPLAYED", "Arrays", "PackedText", "Padding", "grouped", "own_arrays", "padding_of", "stacked"]

MOST_REPLAYED = 128  # rows; with more rows a device computes for longer than their kernels take to launch
Arrays = dict[str, npt.NDArray[Any]]


class PackedText(TextRows):
    """One sequence's rows, as they are packed.

    Attributes:
        again: whether such rows come again, so that they are padded to a bucket, and a graph may have them.
        late: whether its tokens are the device's own, which may still be drawing them.
    """

    def __init__(self, step: StepInput, number: int, device: torch.device | None, backend: str) -> None:
        super().__init__(step, number, device, backend)
        self.again = step.again[number] and self.rows <= MOST_REPLAYED
        each: Any = step.tokens
        self._tokens: Any = each[number] if type(each) is list else each if step.late else each[self.begins : self.ends]
        self.late = type(self._tokens) is not np.ndarray

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[T] the tokens, where they are on the host."""
        ids: npt.NDArray[np.int64] = self._tokens
        return ids

    @property
    def decide(self) -> npt.NDArray[np.bool_] | None:
        """[T] rows that may be accepted, where the device is to decide what is; else None."""
        walk = self._walk
        return walk.accept if walk is not None and walk.decides else None

    @property
    def _walk(self) -> Walk | None:
        walks = self._step.wanted.walks
        return walks[self.number] if walks else None

    @property
    def draws(self) -> tuple[int, int]:
        """What draws follow from, as kernels read it: where they start, and the bits of the inverse temperature."""
        draws = self._step.wanted.draws
        bits = 0 if draws is None else inverse_bits(draws.temperature[self.number])
        return (draws.start[self.number], bits) if draws is not None and bits else (0, 0)

    @cached_property
    def asked(self) -> Arrays:
        """What verification reads there: its rows with logits, those that may be accepted, and text."""
        wanted, walk, found = self._step.wanted, self._walk, Arrays()
        if walk is not None and walk.accept is not None:
            found["accept"] = walk.accept
        if wanted.logits is not None:
            first, last = np.searchsorted(wanted.logits, (self.begins, self.ends))
            if 0 < last - first < self.rows:
                found["rows"] = wanted.logits[first:last] - self.begins
        if walk is not None and walk.unread is not None:
            found["unread"] = np.array(walk.unread, dtype=np.int64)
        return found

    @cached_property
    def shapes(self) -> Arrays:
        """The arrays that kernels read, on the host."""
        return own_arrays(self)

    @cached_property
    def arrays(self) -> Arrays:
        """The others that go to the device."""
        if self.again:  # positions and tokens are among those of kernels
            return self.asked
        arrays: Arrays = {"positions": self.numbers[None, self.first :]}
        if not self.late:
            arrays["tokens"] = self.ids[None]
        return {**arrays, **self.asked}


def own_arrays(part: PackedText) -> Arrays:
    """The arrays of one sequence's rows; those of a chain that does not come ``again`` follow from two of them."""
    before = 0 if part.parents is None else part.first
    known, size = part.length + part.first - before, before + part.rows
    arrays: Arrays = {"counts": np.array([known, before, part.rows], dtype=np.int64), "table": part.cache.table}
    if part.parents is None and not part.again:
        return arrays
    arrays["draws"] = np.array(part.draws, dtype=np.int64)
    if part.again:
        arrays["tokens"] = np.zeros(bucket(part.rows), dtype=np.int64)
        if not part.late:
            arrays["tokens"][: part.rows] = part.ids
        arrays["above"] = _above(part)
    arrays["places"] = np.zeros(bucket(size), dtype=np.int64)
    arrays["places"][:size] = part.length + part.depths[part.first - before :]
    if part.parents is None:
        arrays["closure"] = _chain_closure(size)
    else:
        arrays["closure"] = np.zeros((bucket(part.rows), bucket(size)), dtype=np.bool_)
        arrays["closure"][: part.rows, :size] = ancestors(part.parents)[before:]
    return arrays


def _above(part: PackedText) -> npt.NDArray[np.int64]:
    """One more than the row above each that may be accepted, else 0; of the root 1, where the device is to decide."""
    above, decide = np.zeros(bucket(part.rows), dtype=np.int64), part.decide
    if decide is not None:
        above[: part.rows] = np.where(decide, np.arange(part.rows) if part.parents is None else part.parents + 1, 0)
        above[0] = 1
    return above


@lru_cache(maxsize=MOST_REPLAYED)
def _chain_closure(rows: int) -> npt.NDArray[np.bool_]:
    """[rows, rows] of a chain, whether a row sees another, padded to buckets."""
    closure = np.zeros((bucket(rows), bucket(rows)), dtype=np.bool_)
    closure[:rows, :rows] = np.tri(rows, dtype=np.bool_)
    closure.flags.writeable = False
    return closure


def stacked(parts: Sequence[PackedText], padding: Padding) -> Arrays:
    """The arrays of several sequences, with one more dimension: sequences, padded to a power of two."""
    if all(part.parents is None for part in parts):
        arrays = _chains(parts, padding)
    else:
        each = [part.shapes for part in parts]
        arrays = {name: _stacked([own[name] for own in each]) for name in each[0]}
    # Kernels divide by the slots of a padded sequence, too.
    arrays["table"][len(parts) :] = parts[0].cache.table
    return arrays


class Padding(NamedTuple):
    """What follows from the rows of each sequence alone, so that steps share it.

    Attributes:
        counts: [S] rows.
        fits: [S, K] whether a place is a row's, for as many places as the longest has rows, padded to a bucket.
        above: [sequences, K] of chains, see :func:`own_arrays`.
        closure: [sequences, K, K] of chains, the sequences padded to a bucket.
        spread, packed: see :class:`specdec.runners.sent_rows.SentRows`.
    """

    counts: npt.NDArray[np.int64]
    fits: npt.NDArray[np.bool_]
    above: npt.NDArray[np.int64]
    closure: npt.NDArray[np.bool_]
    spread: npt.NDArray[np.int64]
    packed: npt.NDArray[np.int64]


@lru_cache(maxsize=256)
def padding_of(counts: tuple[int, ...]) -> Padding:
    """Of sequences with these numbers of rows."""
    known = np.array(counts, dtype=np.int64)
    sequences, rows = bucket(len(counts)), bucket(max(counts))
    fits = np.arange(rows) < known[:, None]
    closure = np.zeros((sequences, rows, rows), dtype=np.bool_)
    closure[: len(counts)] = np.tri(rows, dtype=np.bool_) & fits[:, :, None] & fits[:, None]
    above = np.zeros((sequences, rows), dtype=np.int64)
    above[: len(counts)] = np.maximum(np.arange(rows), 1) * fits
    packed, spread = np.flatnonzero(fits), np.zeros(sequences * rows, dtype=np.int64)
    spread[packed] = np.arange(len(packed))
    found = Padding(known, fits, above, closure, spread, packed)
    for array in found:
        array.flags.writeable = False
    return found


def _chains(parts: Sequence[PackedText], padding: Padding) -> Arrays:
    """The arrays as by :func:`_stacked`; of chains they follow from lengths alone."""
    sequences, rows, _ = padding.closure.shape
    known = np.array([part.length + part.first for part in parts], dtype=np.int64)
    counts, places = np.zeros((sequences, 3), dtype=np.int64), np.zeros((sequences, rows), dtype=np.int64)
    own = slice(len(parts))
    counts[own, 0], counts[own, 2] = known, padding.counts
    places[own] = known[:, None] if rows == 1 else (known[:, None] + np.arange(rows)) * padding.fits
    table = np.empty((sequences, *parts[0].cache.table.shape), dtype=np.int64)
    np.concatenate([part.cache.table for part in parts], out=table[own].reshape(-1, table.shape[-1]))
    draws, tokens = np.zeros((sequences, 2), dtype=np.int64), np.zeros((sequences, rows), dtype=np.int64)
    draws[own] = [part.draws for part in parts]
    ids = [np.zeros(part.rows, dtype=np.int64) if part.late else part.ids for part in parts]
    tokens.reshape(-1)[padding.packed] = np.concatenate(ids)
    above = np.zeros((sequences, rows), dtype=np.int64)
    for number, part in enumerate(parts):
        if part.decide is not None:
            above[number, : part.rows] = part.decide
    above *= padding.above
    return {
        "counts": counts,
        "table": table,
        "draws": draws,
        "tokens": tokens,
        "above": above,
        "places": places,
        "closure": padding.closure,
    }


def grouped(parts: Sequence[PackedText]) -> tuple[list[Arrays], npt.NDArray[np.int64]]:
    """The sequences by their number of rows, each group's arrays with ``rows``; and the place of each row in all.

    See :class:`specdec.runners.sent_rows.Group`.
    """
    kinds: dict[tuple[bool, int], list[PackedText]] = {}
    for part in parts:
        kinds.setdefault((part.parents is None, bucket(part.rows)), []).append(part)
    made, order, size = list[Arrays](), np.empty(parts[-1].ends, dtype=np.int64), 0
    for (is_chain, most), each in kinds.items():
        made.append(_of_chains(each) if is_chain else _of_trees(each))
        most = max(part.rows for part in each) if is_chain else most
        rows = np.zeros((len(each), most), dtype=np.int64)
        for own, part in zip(rows, each, strict=True):
            own[: part.rows] = np.arange(part.begins, part.ends)
            order[part.begins : part.ends] = size + np.arange(part.rows)
            size += most
        made[-1]["rows"] = rows.reshape(-1)
    return made, order


def _of_chains(parts: Sequence[PackedText]) -> Arrays:
    """The arrays of chains, padded to the rows of the longest, without what a row sees: all those before it."""
    known = np.array([part.length + part.first for part in parts], dtype=np.int64)
    rows = np.array([part.rows for part in parts], dtype=np.int64)
    return {
        "counts": np.stack((known, np.zeros_like(rows), rows), 1),
        "table": np.stack([part.cache.table for part in parts]),
        "places": known[:, None] + np.arange(rows.max()),
    }


def _of_trees(parts: Sequence[PackedText]) -> Arrays:
    """The arrays of trees whose rows are of one bucket."""
    each = [part.shapes for part in parts]
    return {name: _stacked([own[name] for own in each])[: len(parts)] for name in each[0]}


def _stacked(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One array per sequence, stacked and padded with zeros, for a power of two sequences."""
    shape = np.max([array.shape for array in arrays], 0)
    found = np.zeros((bucket(len(arrays)), *shape), dtype=arrays[0].dtype)
    for own, array in zip(found, arrays, strict=False):
        own[tuple(map(slice, array.shape))] = array
    return found
