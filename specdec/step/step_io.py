"""StepInput: a forward of a model, for one sequence or several, in plain numbers.

It says which tokens run, what each of them sees, which layers run, and what is wanted of them. Whoever runs layers
makes of it what its own code needs: addresses, masks, a buffer for a device. A plain step is a chain of one row, a
chunk of a prompt a chain without logits, and one sequence a batch of one.

The i-th row of a sequence's tree is stored at position ``length + i`` of its text, whatever its depth, and stands at
position ``length + depth``. A row sees its sequence's committed text, its ancestors and itself. So a forward is a
function of committed text and its own rows, and may run twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # this file needs no torch
    from specdec.step.cache import KVCache

__all__ = [
    "ALL",
    "FINAL",
    "NOTHING",
    "WHOLE",
    "Draws",
    "Entering",
    "LayerPlan",
    "Part",
    "StepInput",
    "Walk",
    "Wanted",
    "fixed",
]

Tokens = Any
"""int64 [N], of numpy, or a tensor of torch where a device has drawn them."""

Ints = npt.NDArray[np.int32]
_INT = 4  # bytes of a row's parent, and of its depth


FINAL = -1
"""Among hidden layers: the states after the last norm, which the head reads."""


class Part(IntFlag):
    """What a decoder layer is made of."""

    ATTENTION, MLP = 1, 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The layers that run, of all rows of a forward; passes with equal plans may be one forward.

    Attributes:
        last: the layer to stop before; None runs all layers, and the head.
        parts: [layers] the parts of each layer that run; empty where every part runs.
    """

    last: int | None = None
    parts: Sequence[Part] = ()

    def runs(self, first: int, last: int) -> list[tuple[Part, int, int]]:
        """What runs of layers [first, last), in order: ranges of layers of which the same parts run."""
        parts = [(layer, self.parts[layer] if self.parts else Part.BOTH) for layer in range(first, last)]
        groups = [(which, [layer for layer, _ in own]) for which, own in groupby(parts, key=itemgetter(1)) if which]
        return [(which, layers[0], layers[-1] + 1) for which, layers in groups]


@dataclass(frozen=True, slots=True, eq=False)
class Entering:
    """Hidden states of rows that passed the first layers already; the others begin with their tokens.

    Attributes:
        layer: the layer that the rows enter; in a forward [B] one for each sequence, ascending, and -1 for sequences of
            tokens. Keys and values of the layers before it are in the rows' slots.
        hidden: [rows, D] in the target's dtype and on the device of ``layer``; in a forward a list of these, one for
            each sequence that enters.
    """

    layer: int | Sequence[int]
    hidden: Any


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """What the target's draws at a temperature follow from; noise depends on a row's position alone.

    Attributes:
        start: [B] see :attr:`specdec.sampling.noise.Noise.start`.
        temperature: [B]; 0 where nothing is drawn.
    """

    start: Sequence[int]
    temperature: Sequence[float]


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """What a sequence's verification reads where the logits are.

    Attributes:
        accept: bool [rows] those that may be accepted, if the path is asked for there; else None.
        decides: whether that path is the executor's to decide: it walks the tree by its own argmax or draws, and moves
            the accepted rows together.
        unread: the tokens of the text that its processors read there, and that are not there yet; None where they read
            none.
    """

    accept: npt.NDArray[np.bool_] | None = None
    decides: bool = False
    unread: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What is wanted of a forward besides the hidden states behind its last layer.

    Attributes:
        logits: int64 [R] rows with logits, ascending; None for all, empty for none.
        top_k: how many of each row's largest logits will be read.
        hidden: the layers whose input is returned; ``specdec.FINAL``: what the head reads.
        draws: of the rows with logits, if any may be made together with them.
        walks: [B] what is walked and read where the logits are; empty where nothing is.
    """

    logits: npt.NDArray[np.int64] | None = None
    top_k: int = 1
    hidden: Collection[int] = ()
    draws: Draws | None = None
    walks: Sequence[Walk] = ()

    @property
    def decides(self) -> bool:
        """Whether the executor decides a sequence's path."""
        return any(walk.decides for walk in self.walks)

    @property
    def scored(self) -> list[int] | None:
        """The rows with logits; None for all."""
        return None if self.logits is None else self.logits.tolist()

    @property
    def nothing(self) -> bool:
        """Whether no logits are wanted."""
        return self.logits is not None and not len(self.logits)


WHOLE, ALL = LayerPlan(), Wanted()
NOTHING = Wanted(np.empty(0, dtype=np.int64), 0)
"""No logits, as of text."""
_TREE, _CHAIN = (False,), (True,)


@dataclass(slots=True, eq=False)
class StepInput:
    """B sequences, T rows of this forward, N rows of their trees so far.

    What there is one of for each row is of numpy. Shapes that come again and again share their arrays.

    Attributes:
        texts: [B] what is held of each text.
        starts: [B + 1]; sequence b has the rows ``starts[b]`` to ``starts[b + 1]``.
        tokens: int64 [T]; a device's own where a drafter drew them there, and where not all are there, a list of [B].
        lengths: [B] committed tokens.
        tree: [B + 1]; sequence b has the tree's rows ``tree[b]`` to ``tree[b + 1]``, of which the last ones run now.
        parents, depths: int32 [N], within a tree; -1 is the parent of its root.
        rows: T.
        end: one more than the last position of a row, or further.
        chain: [B] whether a tree is one path, so that its parents need not be read.
        plan: the layers.
        wanted: what is returned.
        entering: hidden states of rows that passed the first layers, if there are such rows.
        again: [B] whether such rows come again and again, so that a recorded graph of their forward pays.
    """

    texts: Sequence[KVCache]
    starts: Sequence[int]
    tokens: Tokens | Sequence[Tokens]
    lengths: Sequence[int]
    tree: Sequence[int]
    parents: Ints
    depths: Ints
    rows: int
    end: int
    chain: Sequence[bool]
    plan: LayerPlan = WHOLE
    wanted: Wanted = ALL
    entering: Entering | None = None
    again: Sequence[bool] = (True,)

    @classmethod
    def of(
        cls,
        text: KVCache,
        tokens: Sequence[int] | Tokens,
        tree: tuple[Sequence[int], Sequence[int]] | None = None,
        *,
        first: int = 0,
        plan: LayerPlan = WHOLE,
        wanted: Wanted = ALL,
        entering: Entering | None = None,
        again: bool = True,
    ) -> StepInput:
        """The rows of one sequence, for which its text makes room.

        Args:
            text: what is held of the text.
            tokens: of the T rows; an int64 tensor is kept where it is.
            tree: parents and depths of the tree up to the last of these rows, or further; None for a chain.
            first: the first row of the tree that is run; those above it were run before.
            plan, wanted, again: see the attributes.
            entering: of a draft.

        Raises:
            CacheError: no memory is left for the rows.
        """
        last, length = first + len(tokens), text.length
        text.reserve(length + last)
        starts, ends, parents, depths = _chain(first, last)
        deepest = last - 1
        if tree is not None:
            parents, depths = (np.array(own[:last], dtype=np.int32) for own in tree)
            deepest = max(tree[1][first:last])
        own: Any = tokens if hasattr(tokens, "data_ptr") else np.array(tokens, dtype=np.int64)  # a tensor of torch
        if entering is not None:
            layer: Any = entering.layer
            entering = Entering((layer,), (entering.hidden,))
        return cls(
            (text,),
            starts,
            own,
            (length,),
            ends,
            parents,
            depths,
            last - first,
            length + deepest + 1,
            _CHAIN if tree is None else _TREE,
            plan,
            wanted,
            entering,
            (again,),
        )

    @property
    def counts(self) -> list[int]:
        """[B] rows of each sequence."""
        return [last - first for first, last in zip(self.starts, self.starts[1:], strict=False)]

    def last_rows(self, counts: Sequence[int]) -> list[int]:
        """The last rows of each sequence, as many as ``counts`` says."""
        ends = zip(self.starts[1:], counts, strict=False)
        return [row for end, count in ends for row in range(end - count, end)]

    def blocks(self, counts: Sequence[int] | None = None) -> tuple[list[int], int]:
        """Six numbers of each sequence as the native library reads them (types.h), and the most keys that a row sees.

        They name addresses, which are valid while this object is and until a cache grows. ``counts``: of each sequence
        its last rows alone, as many as these.
        """
        parents, depths = self.parents.__array_interface__["data"][0], self.depths.__array_interface__["data"][0]
        most, numbers, tree, starts = 0, list[int](), self.tree, self.starts
        for number, text in enumerate(self.texts):
            begin, length = tree[number], self.lengths[number]
            rows = starts[number + 1] - starts[number] if counts is None else counts[number]
            size, above = tree[number + 1] - begin, _INT * begin
            most = most if most > length + size else length + size
            slots = text.listed or text.list_slots()
            numbers += (length, size - rows, rows, parents + above, depths + above, slots)
        return numbers, most

    @property
    def late(self) -> bool:
        """Whether tokens are on a device, which may still be drawing them."""
        return type(self.tokens) is not np.ndarray

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[T] the tokens on the host; waits for a device that is still drawing them."""
        tokens: Any = self.tokens
        if type(tokens) is np.ndarray:
            return tokens
        parts = tokens if type(tokens) is list else [tokens]
        return np.concatenate([np.array(own.tolist(), dtype=np.int64) for own in parts])


@lru_cache(maxsize=256)
def _chain(first: int, last: int) -> tuple[tuple[int, int], tuple[int, int], Ints, Ints]:
    """Rows ``first`` to ``last`` of a chain: starts, tree, parents and depths."""
    return (0, last - first), (0, last), fixed(np.arange(-1, last - 1)), fixed(np.arange(last))


def fixed(numbers: npt.NDArray[Any]) -> Ints:
    """The numbers as a read-only array, as callers share it."""
    own = numbers.astype(np.int32)
    own.flags.writeable = False
    return own
