"""Draft: the tree of tokens that one target forward verifies.

Row 0 is the root, the last emitted token, whose keys and values are not cached yet. Every other row names an earlier
row as its parent, sees the committed cache, its ancestors and itself, and stands at position ``length + depth``. That
one rule is lookahead's window mask, Medusa's tree, REST's trie and prompt lookup's chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from specdec.errors import DraftError, first_line, shown
from specdec.step.step_io import Entering

__all__ = ["NO_HINTS", "Draft", "DraftBuilder", "Hints", "ancestors"]


@dataclass(frozen=True, slots=True)
class Hints:
    """What a drafter knows of its draft's worth. Row policies and mergers read it; verification does not.

    Attributes:
        match_length: tokens at the text's end that the drafter found elsewhere, or another measure of how sure it is.
            Drafts of similar lengths are judged by how such drafts have fared.
        chances: per row, the probability that it is right where its parent is, 1 for the root. Left empty, the
            probabilities are estimated from the drafter's earlier rows.
        cost: plain steps of the target that a model took to make the draft. Verifying its rows is not included.
    """

    match_length: int = 0
    chances: Sequence[float] = ()
    cost: float = 0.0


NO_HINTS = Hints()
_ROOT = range(-1, 0)  # the root's parent, of a draft without other rows


@dataclass(slots=True, eq=False)
class Draft:
    """The T rows of one step. A draft is not changed once it is made; it is not frozen because that would be slower.

    Attributes:
        tokens: T token ids; ``tokens[0]`` is the root. Empty while they are ``on_device``.
        parents: T row numbers; ``parents[0] == -1`` and ``0 <= parents[i] < i``.
        probes: rows that are computed and never accepted, as a lookahead window's.
        read: probes whose logits the session reads in ``observe``; those of candidates are always computed.
        q: for a row whose children were *sampled*: the distribution [V] they were drawn from, without replacement and
            in row order. Never set it for children that were chosen (argmax, n-gram): that would bias the output.
        entry: hidden states of rows that already passed the first layers, or None.
        hints: what the drafter knows of the draft's worth.
        on_device: int64 [T] the tokens, where a drafter drew them on the target's device and none was read. A forward
            embeds them there; ``tokens`` are filled in with the step's one copy.

    Raises:
        DraftError: the rows do not form a tree in topological order, or name rows that do not exist.

    Example: the root 7 with children 8 and 9, and 10 below 8, is
    ``Draft(tokens=(7, 8, 9, 10), parents=(-1, 0, 0, 1))``; its depths are ``[0, 1, 1, 2]``.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    probes: frozenset[int] = frozenset()
    read: Sequence[int] = ()
    q: Mapping[int, torch.Tensor] = field(default_factory=dict)
    entry: Entering | None = None
    hints: Hints = NO_HINTS
    on_device: torch.Tensor | None = None
    depths: list[int] = field(init=False)
    is_chain: bool = field(init=False)

    def __post_init__(self) -> None:
        try:
            depths, is_chain = self._tree()
        except (TypeError, ValueError, IndexError, RuntimeError) as error:  # what odd types make of the comparisons
            tokens, parents = ((shown(rows), type(rows).__name__) for rows in (self.tokens, self.parents))
            raise DraftError(
                f"the draft's tokens are {tokens[0]}, of type {tokens[1]}, its parents are {parents[0]}, of type "
                f"{parents[1]}; both are sequences of integers, as probes and read are ({first_line(error)})"
            ) from error
        self.depths, self.is_chain = depths, is_chain

    def _tree(self) -> tuple[list[int], bool]:
        """Each row's depth, and whether the rows are one path; raises DraftError where they are no tree."""
        tokens, parents = self.tokens, self.parents
        count = len(tokens) if self.on_device is None else len(self.on_device)
        if not count or count != len(parents) or parents[0] != -1:
            raise DraftError(
                f"a draft needs one parent per token and -1 as the root's, got {count} tokens and parents "
                f"{list(parents[:8])}; build it with DraftBuilder"
            )
        if type(parents) is range and parents.step == 1:  # from -1, so that each is the row before
            depths, is_chain = [*range(len(parents))], True
        else:
            depths, is_chain = _depths(parents)
        if self.probes or self.read or self.q:
            named = (*self.probes, *self.read, *self.q)
            if not 0 <= min(named) <= max(named) < count:
                raise DraftError(f"probes, read or q name a row outside [0, {count})")
            if 0 in self.probes:
                raise DraftError("row 0 is the root and cannot be a probe")
        return depths, is_chain

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def chain(
        cls, tokens: Sequence[int], *, q: Mapping[int, torch.Tensor] | None = None, hints: Hints = NO_HINTS
    ) -> Draft:
        """The root and a single path below it."""
        return cls(tokens, range(-1, len(tokens) - 1), q=q or {}, hints=hints)

    @classmethod
    def root(cls, token: int) -> Draft:
        """The root alone; nothing of it has to be checked."""
        made = object.__new__(cls)
        made.tokens, made.parents, made.depths, made.is_chain = [token], _ROOT, [0], True
        made.probes, made.read, made.q, made.hints = frozenset(), (), {}, NO_HINTS
        made.entry = made.on_device = None
        return made

    def on_host(self, tokens: Sequence[int] | None = None) -> Draft:
        """Have the tokens on the host: these, if they were copied already, else by a copy that waits for the device."""
        if self.on_device is not None:
            self.tokens, self.on_device = self.on_device.tolist() if tokens is None else tokens, None
        return self

    @property
    def tree(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Parents and depths; None where the rows are one path."""
        return None if self.is_chain else (self.parents, self.depths)

    def marked(self, probes: frozenset[int]) -> Draft:
        """The same rows with other probes, none of them the root; the tree is not checked again."""
        made = object.__new__(Draft)
        for name in Draft.__slots__:
            setattr(made, name, getattr(self, name))
        made.probes = probes
        return made

    def scored_rows(self) -> list[int] | None:
        """The rows whose logits are needed, ascending; None for all of them."""
        if not self.probes:
            return None
        read = set(self.read)
        return [row for row in range(len(self)) if row not in self.probes or row in read]

    def children(self) -> list[list[int]]:
        """For every row, its candidate children in row order."""
        below: list[list[int]] = [[] for _ in self.parents]
        for row in range(1, len(self)):
            if row not in self.probes:
                below[self.parents[row]].append(row)
        return below

    def path_tokens(self, row: int) -> list[int]:
        """Tokens below the root, down to and with ``row``."""
        path = list[int]()
        while row:
            path.append(self.tokens[row])
            row = self.parents[row]
        return path[::-1]

    def child(self, row: int, token: int) -> int | None:
        """The first candidate child of ``row`` that holds ``token``, or None."""
        size = len(self.tokens)
        for below in range(row + 1, min(row + 2, size) if self.is_chain else size):
            if self.parents[below] == row and self.tokens[below] == token and below not in self.probes:
                return below
        return None


def _depths(parents: Sequence[int]) -> tuple[list[int], bool]:
    """As ``Draft._tree``, from the parents alone."""
    depths = [0]
    for row, parent in enumerate(parents):
        if 0 <= parent < row:
            depths.append(depths[parent] + 1)
        elif row:
            raise DraftError(f"row {row} names row {parent} as its parent; parents come first, in [0, {row})")
    return depths, depths[-1] == len(depths) - 1


class DraftBuilder:
    """Builds a draft as a trie: a prefix that two sources share is one row.

    Only for tokens that were *chosen*; sampled siblings must stay apart, or rejection is biased.
    """

    def __init__(self, root: int) -> None:
        self._tokens = [root]
        self._parents = [-1]
        self._probes: set[int] = set()
        self._rows: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, *, candidate: bool = True) -> int:
        """The row of ``token`` below ``parent``, new or existing; a row that was once a candidate stays one."""
        row = self._rows.get((parent, token))
        if row is None:
            row = self._rows[parent, token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
            if not candidate:
                self._probes.add(row)
        elif candidate:
            self._probes.discard(row)
        return row

    def add_path(self, tokens: Iterable[int], *, row_budget: int | None = None) -> list[int]:
        """Add a path of candidates below the root, stopping where the tree has ``row_budget`` rows."""
        parent, rows = 0, list[int]()
        for token in tokens:
            if row_budget is not None and len(self) >= row_budget and (parent, token) not in self._rows:
                break
            parent = self.add(parent, token)
            rows.append(parent)
        return rows

    def build(self, *, read: Sequence[int] = (), hints: Hints = NO_HINTS) -> Draft:
        """The draft as it stands."""
        return Draft(self._tokens, self._parents, probes=frozenset(self._probes), read=read, hints=hints)


def ancestors(parents: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """[T, T] bool: whether row i sees row j, which is when j is i or one of i's ancestors.

    Example: parents (-1, 0, 0, 1) give 1000, 1100, 1010, 1101.
    """
    closure = np.eye(len(parents), dtype=np.bool_)
    for row in range(1, len(parents)):
        closure[row] |= closure[parents[row]]
    return closure
