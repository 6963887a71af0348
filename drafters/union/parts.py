"""The parts of a merged drafter: how a part's draft is put into the common tree, and what the part observes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

import torch

from drafters.union.bandit import BY_MATCH, DEPTHS, MATCHES, ONWARD, RANKS, Bandit, kind_of
from specdec.drafter import Context, Drafter, Observation
from specdec.drafting.sessions import session_of
from specdec.step import device_copies
from specdec.step.tree import Draft

__all__ = ["NO_ROWS", "MergedPart", "Tree", "part_of"]

_BY_RANK = (1.0, 0.35, 0.2, 0.1)
_DISSENT = 0.3

NO_ROWS = frozenset[int]()


class Tree:
    """The rows that all parts propose, equal paths once: per row its token, parent and probability to be reached."""

    __slots__ = ("heirs", "is_chain", "needed", "parents", "probes", "reach", "rows", "tokens")

    rows: dict[tuple[int, int], int]  # parent and token -> row
    heirs: dict[int, int]  # row -> its first child

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.reach = [root], [-1], [1.0]
        self.probes = self.needed = NO_ROWS
        self.is_chain = True  # a single path of candidates so far

    def extend(self, tokens: Sequence[int], reach: Sequence[float]) -> None:
        """Add a path of candidates below the root of an empty tree."""
        self.tokens += tokens
        self.parents += range(len(tokens))
        self.reach += reach

    def find(self) -> None:
        """Fill ``rows`` and ``heirs``, which ``extend`` does not."""
        if self.is_chain:
            self.rows = {(row - 1, self.tokens[row]): row for row in range(1, len(self.tokens))}
            self.heirs = {row: row + 1 for row in range(len(self.tokens) - 1)}
            self.is_chain = False

    def put(self, row: int, parent: int, token: int, reach: float, candidate: bool) -> int:
        """Add a row, or update the existing ``row`` >= 0; the larger of two probabilities counts."""
        if row < 0:
            row = self.rows[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.reach.append(reach)
            self.heirs.setdefault(parent, row)
            if not candidate:
                self.probes |= {row}
        else:
            if reach > self.reach[row]:
                self.reach[row] = reach
            if candidate:
                self.probes -= {row}
        return row

    def need(self, row: int) -> None:
        """Mark a row and its ancestors as rows to be verified in any case."""
        while row > 0 and row not in self.needed:
            self.needed |= {row}
            row = self.parents[row]

    def best(self, most: int) -> list[int]:
        """The rows that may be left out, the likeliest first, so that parents come before their children."""
        rest = [*range(1, len(self.tokens))]
        if self.probes or self.needed:
            rest = [row for row in rest if row not in self.probes and row not in self.needed]
        if not self.is_chain:
            rest.sort(key=self.reach.__getitem__, reverse=True)
        return rest[:most]


class MergedPart:
    """A part in one sequence: its session, its latest draft, and the draft's rows in the tree."""

    __slots__ = (
        "active",
        "added",
        "bandit",
        "draft",
        "kinds",
        "maps",
        "name",
        "observes",
        "rows",
        "session",
        "taps",
    )

    def __init__(self, drafter: Drafter, bandit: Bandit, context: Context) -> None:
        self.name, self.taps = drafter.name, drafter.taps
        self.observes = bool(drafter.taps) or drafter.needs_observe
        self.maps = drafter.needs_draft
        self.bandit = bandit
        self.session = session_of(drafter, context)
        self.active = False
        self.draft = Draft.chain([context.root])
        self.rows = [0]  # own row -> row of the tree; -1: left out
        self.kinds = [0]  # of its own rows; a row's kind is a number below _KINDS
        self.added = range(0)  # rows of the tree that no part before it proposed

    def place(self, tree: Tree, least: float) -> None:
        """Put the draft's rows into the tree if their probability to be reached is at least ``least``.

        The first row of a path that is left out is recorded as well, as its probability may rise.
        """
        draft, first = self.draft, len(tree.tokens)
        if len(draft) == 1:
            self.rows, self.kinds, self.added = [0], [0], range(0)
            return
        match = min(draft.hints.match_length.bit_length(), MATCHES)
        if draft.is_chain and first == 1 and not (draft.read or draft.probes or draft.hints.chances):
            self._lay(tree, least, match)
        else:
            self._merge(tree, least, match)
        self.added = range(first, len(tree.tokens))

    def _lay(self, tree: Tree, least: float, match: int) -> None:
        """As ``_merge``, for a chain of candidates and an empty tree."""
        tokens, first = self.draft.tokens, kind_of(match, 0, 0, False)
        reach = self.bandit.reach(match, len(tokens) - 1, least)
        size = len(reach) + 1
        tree.extend(tokens[1:size], reach)
        self.rows = [*range(size), *[-1] * (len(tokens) - size)]
        self.kinds = [first + min(own, DEPTHS) for own in range(min(size + 1, len(tokens)))]

    def _merge(self, tree: Tree, least: float, match: int) -> None:
        draft, first, chance_of, own_chances = (
            self.draft,
            len(tree.tokens),
            self.bandit.chance,
            self.draft.hints.chances,
        )
        size, probes = len(draft), draft.probes
        self.rows, self.kinds = rows, kinds = [0], [0]
        chances, ranks = [1.0], [0] * size
        if draft.read:  # a row that is read needs all of its ancestors
            least = 0.0
        tree.find()
        known, heirs, reaches = tree.rows, tree.heirs, tree.reach
        own_rows = zip(range(size), draft.tokens, draft.parents, draft.depths, strict=True)
        for own, token, above, depth in islice(own_rows, 1, None):
            parent, rank = rows[above], ranks[above]
            if parent < 0:
                rows.append(-1)
                kinds.append(0)
                chances.append(0.0)
                continue
            ranks[above] = rank + 1
            row = known.get((parent, token), -1)
            # Parts before it propose other tokens after ``parent``, and none of them this one.
            dissents = not 0 <= row < first and heirs.get(parent, first) < first
            rank, deep = (rank if rank < RANKS else RANKS - 1), (depth if depth < DEPTHS else DEPTHS)
            kind = kind_of(match, deep, rank, dissents)
            if own_chances:
                chance = own_chances[own]
            else:
                supposed = (max(chances[above], ONWARD) if depth > 1 else BY_MATCH[match]) * _BY_RANK[rank]
                chance = chance_of(kind, supposed * _DISSENT if dissents else supposed)
            reach = reaches[parent] * chance
            if reach >= least:
                row = tree.put(row, parent, token, reach, own not in probes)
            rows.append(row)
            kinds.append(kind)
            chances.append(chance)
            if row < 0 and draft.is_chain:
                rows += [-1] * (size - own - 1)
                break
        for own in draft.read:
            tree.need(rows[own])

    def judge(self, text: Sequence[int]) -> None:
        """Record which of the draft's rows were right, by the tokens that the step emitted."""
        draft, note, size, right = self.draft, self.bandit.note, len(text), [True]
        # ``kinds`` may be shorter than the rest.
        rows = zip(self.kinds, self.rows, draft.tokens, draft.parents, draft.depths, strict=False)
        for kind, row, token, parent, depth in islice(rows, 1, None):
            if depth <= size and right[parent]:
                hit = token == text[depth - 1]
                note(kind, hit)
                right.append(hit and row >= 0)  # of what was left out, the children are of no kind
            elif draft.is_chain:
                break
            else:
                right.append(False)


def part_of(seen: Observation, draft: Draft, rows: Sequence[int], taps: Collection[int]) -> Observation:
    """The observation of one part's ``draft``, whose row i was row ``rows[i]`` of the whole, with the part's taps.

    Where the accepted path leaves the part's rows, the missing rows are appended to its draft, so that path, tokens and
    taps are consistent. A row that was left out, -1, becomes a probe whose logits are not read; its taps are undefined.
    """
    merged, path, scores = seen.draft, seen.path, seen.scores
    assert merged is not None
    assert scores is not None
    unscored = merged.probes.difference(merged.read)
    if rows == [*range(len(merged))] and unscored <= draft.probes:  # no other part proposed rows
        hidden = {layer: seen.taps[layer] for layer in taps}
        return Observation(draft, list(path), seen.tokens, scores, hidden, seen.readback)
    if len(rows) == 1:  # the part had no rows in the step, and observes the text only
        chain = Draft.chain([merged.tokens[row] for row in path])
        hidden = {layer: _rows(seen.taps[layer], path) for layer in taps}
        return Observation(chain, range(len(path)), seen.tokens, scores.select(path, None), hidden, seen.readback)
    # Others' rows are the end of the path: rows below another part's row are not this part's.
    others = [row for row in path if row not in rows]
    union_rows = [*rows, *others]
    path = [union_rows.index(row) for row in path]  # the first of equal rows
    size = len(union_rows)
    probes = draft.probes.difference(path) | {own for own, row in enumerate(rows) if row < 0 or row in unscored}
    if others:
        tokens = [*draft.tokens, *(merged.tokens[row] for row in others)]
        parents = [*draft.parents, *path[-len(others) - 1 : -1]]
        own_draft = Draft(tokens, parents, probes=probes, read=draft.read)
    else:
        own_draft = draft.marked(probes)
    if unread := probes.difference(draft.read):
        numbers = [own for own in range(size) if own not in unread]
        scores = scores.select([union_rows[own] for own in numbers], numbers)
    else:
        scores = scores.select(union_rows, None)
    hidden = {layer: _rows(seen.taps[layer], union_rows) for layer in taps}  # [rows of own_draft, D]
    return Observation(own_draft, path, seen.tokens, scores, hidden, seen.readback)


def _rows(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The given ``rows`` of hidden states; the first rows in order are a view, as nothing writes to them later."""
    return hidden[: len(rows)] if [*rows] == [*range(len(rows))] else device_copies.pick(hidden, rows)
