"""Drafts that the native library grows: all passes of a draft are one call, for one sequence or several.

The library grows a draft as :class:`drafters.heads.growing.GrowingSession` does, node by node with the same numbers,
from the same passes of the head. So a draft does not depend on where it is grown.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof, byref, c_double, c_int32, c_int64, c_uint64, c_void_p, string_at
from dataclasses import dataclass
from typing import Any

import torch

from drafters.heads.native_chain import NativeChain
from specdec.native.library import library
from specdec.native.types import CGrowing, CTransitions
from specdec.sampling.noise import Noise
from specdec.step.cache import KVCache

__all__ = ["Grown", "NativeGrowth", "Waiting", "grow", "grow_block"]

_PARTS = 8  # tensors of waiting states that are kept apart; more are copied together


class Waiting:
    """The target's hidden states of rows that the head has not run yet, where the target left them.

    Args:
        chain: the head.
    """

    def __init__(self, chain: NativeChain) -> None:
        self._chain, self._size = chain, chain.features // chain.taps
        self._parts: list[tuple[list[torch.Tensor], Sequence[int]]] = []

    def add(self, taps: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Have ``rows`` of the hidden states [T, D] of each tap wait."""
        dtype = self._chain.dtype
        self._parts.append(([_readable(tap, dtype) for tap in taps], rows))
        if len(self._parts) > _PARTS:  # a forward's states would be kept for a few of its rows
            self.add_joined(self.take())

    def add_joined(self, features: torch.Tensor) -> None:
        """Have hidden states [T, taps x D] wait."""
        self.add([part.contiguous() for part in features.chunk(self._chain.taps, -1)], range(len(features)))

    def take(self) -> torch.Tensor:
        """[T, taps x D] all states, which wait no longer."""
        parts = [torch.cat([tap[[*rows]] for tap in taps], -1) for taps, rows in self._parts]
        self._parts.clear()
        return torch.cat(parts)

    def addresses(self) -> array[int]:
        """The addresses of each row's states, of all its taps; valid until ``clear``."""
        found, each = array("Q"), self._size * self._chain.dtype.itemsize
        for taps, rows in self._parts:
            first = [tap.data_ptr() for tap in taps]
            found.extend([address + row * each for row in rows for address in first])
        return found

    def clear(self) -> None:
        """Drop all states."""
        self._parts.clear()


def _readable(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """States as the library reads them."""
    if states.dtype is dtype and states.is_contiguous() and states.is_cpu:
        return states
    return states.to("cpu", dtype).contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """A draft that was grown, and the guesses that it was chosen from.

    Attributes:
        draft: tokens, parents and chances of the draft's rows.
        passes: passes of the head.
        tokens: of all nodes, in the order in which they grew, the root's first.
        first, below: a node's children are nodes ``first`` to ``first + below``.
        promises: chance that the head gave a node's likeliest child; 0 if it gave none.
    """

    draft: tuple[list[int], list[int], list[float]]
    passes: int
    tokens: Any
    first: Any
    below: Any
    promises: Any

    def children(self, node: int) -> range:
        """As :meth:`drafters.heads.growth.Growth.children`."""
        first = self.first[node]
        return range(first, first + self.below[node])

    def promised(self, node: int) -> float:
        """As :meth:`drafters.heads.growth.Growth.promised`."""
        promise: float = self.promises[node]
        return promise


class NativeGrowth:
    """What a sequence's drafts are grown from, and where; a draft goes out as :class:`Grown`.

    Args:
        cache: the head's cache.
        deepest: most tokens of a path.
        most: most rows of a draft below the root.
        branch: most children of a row.
        width: most rows of a level that are run.
        prices: what the first 1, 2, ... ``most`` rows cost, in tokens.
        level_price: what a further pass costs, in tokens.
        least: chance from which a row is verified and extended at any cost; None: where it pays.
        noise: the target's noise over the draft vocabulary, where guesses are coupled with it; else None.
        temperature: factor on guesses and noise.
        divisor: logits are divided by it before; 0 for no division.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        deepest: int,
        most: int,
        branch: int,
        width: int,
        prices: Sequence[float],
        level_price: float,
        least: float | None,
        noise: Noise | None,
        temperature: float,
        divisor: float,
    ) -> None:
        deepest, self._cache, self._noise = min(deepest, most), cache, noise
        self._keys: dict[int, int] = {}
        self._deepest, self._branch, self._width = deepest, branch, width
        nodes, rows = 1 + min(branch, most) * (1 + width * (deepest - 1)), 1 + width * (deepest - 1)
        self._nodes: list[Any] = [(c_int64 * nodes)(), (c_int64 * nodes)(), (c_int64 * nodes)(), (c_double * nodes)()]
        self._draft = (c_int64 * (most + 1))(), (c_int64 * (most + 1))(), (c_double * (most + 1))()
        self._held: list[Any] = [
            (c_double * most)(*prices), (c_int64 * nodes)(), (c_int32 * nodes)(), (c_int32 * nodes)(),
            (c_double * nodes)(), (c_double * nodes)(), (c_int32 * rows)(), (c_int32 * rows)(),
            (c_int64 * (most + 1))(), (c_int64 * width)(),
        ]  # fmt: skip
        price, parents, depths, places, chances, reach, tree, tree_depths, best, level = map(addressof, self._held)
        own = [addressof(one) for one in (*self._nodes, *self._draft)]
        self._told = CGrowing(
            prices=price, width=width, level_price=level_price, least=-1.0 if least is None else least,
            temperature=temperature, divisor=divisor, tokens=own[0], parents=parents, first=own[1], below=own[2],
            depths=depths, places=places, chances=chances, reach=reach, promised=own[3], tree_parents=tree,
            tree_depths=tree_depths, best=best, level=level, draft_tokens=own[4], draft_parents=own[5],
            draft_chances=own[6],
        )  # fmt: skip
        self.address = addressof(self._told)
        self.end = 0
        self._text: tuple[Any, ...] = ()

    def begin(
        self,
        text: Sequence[int],
        features: array[int] | None,
        *,
        most: int,
        deepest: int,
        position: int,
        sure: float,
        accepted: float,
        guesses: float,
    ) -> None:
        """Prepare a draft.

        Args:
            text: tokens of the rows that the cache lacks, the root last.
            features: addresses of the target's hidden states for these rows; None where a block is run for the draft.
            most: most rows below the root.
            deepest: most tokens of a path.
            position: position of the token that is guessed behind the root.
            sure: factor on chances.
            accepted, guesses: the number of nodes with an accepted child, and the number of all nodes that were judged.
        """
        told, cache, deepest = self._told, self._cache, min(deepest, most)
        length = cache.length
        if features is not None:
            self.end = length + len(text) + self._width * (deepest - 1)  # slots; positions end before
            cache.reserve(self.end)
            told.slots, told.features = cache.listed or cache.list_slots(), features.buffer_info()[0]
        tokens = (c_int64 * len(text))(*text)
        keys = None if self._noise is None else (c_uint64 * deepest)(*self._keys_from(position, deepest))
        self._text = tokens, features, keys
        told.text = addressof(tokens)
        told.keys = None if keys is None else addressof(keys)
        told.length, told.rows, told.most, told.deepest = length, len(text), most, deepest
        told.branch = min(self._branch, most)
        told.sure, told.accepted, told.guesses = sure, accepted, guesses

    def _keys_from(self, position: int, count: int) -> list[int]:
        """Keys of the noise at positions; those of the latest draft are known."""
        assert self._noise is not None
        known, make = self._keys, self._noise.key
        places = range(position, position + count)
        self._keys = {place: known[place] if place in known else make(place) for place in places}
        return [*self._keys.values()]

    def grown(self) -> Grown:
        """A copy of the draft that was grown."""
        told, rows = self._told, self._told.kept + 1
        tokens, parents, chances = self._draft
        size = 8 * told.size
        *whole, promises = [memoryview(string_at(one, size)) for one in self._nodes]
        named, first, below = [one.cast("q") for one in whole]
        draft = tokens[:rows], parents[:rows], chances[:rows]
        return Grown(draft, told.passes, named, first, below, promises.cast("d"))


def grow(chain: NativeChain, several: Sequence[NativeGrowth]) -> list[Grown]:
    """The drafts that were prepared, grown together."""
    turns = chain.turns.reach(max(one.end for one in several))
    pointers = (c_void_p * len(several))(*[one.address for one in several])
    library().specdec_grow(byref(chain.described), pointers, len(several), turns, torch.get_num_threads())
    return [one.grown() for one in several]


def grow_block(transitions: CTransitions, growth: NativeGrowth, hidden: torch.Tensor, logits: torch.Tensor) -> Grown:
    """The draft that was prepared, grown from the ``hidden`` states [B, W] and ``logits`` [B, d] of a block."""
    hidden, logits = hidden.contiguous(), logits.contiguous()
    library().specdec_grow_block(
        byref(transitions), growth.address, hidden.data_ptr(), logits.data_ptr(), torch.get_num_threads()
    )
    return growth.grown()
