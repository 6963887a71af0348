"""Merge: the trees of several drafters in one, and what each of them has been worth.

Equal paths share rows. Each row is judged by how such rows have fared: of that part, with a match of that length, at
that depth and rank; the chance that a row is reached is the product along its path, and the best rows are taken. A part
whose accepted rows do not earn what its rows and its drafting cost sleeps, and is woken now and then. All of that
follows from steps that are over, never from the one that is drafted for.

A row that was not taken is judged all the same where its parent was accepted: the text says whether it was right. So
a change for the better is noticed without paying for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Any, ClassVar

import torch

from specdec import copies
from specdec.config import check_positive
from specdec.draft import Draft
from specdec.drafter import (
    AskingSession,
    BatchedSession,
    Context,
    Drafter,
    DrafterBase,
    Observation,
    Question,
    proposing,
    session_of,
)
from specdec.errors import ConfigError
from specdec.passes import Passes
from specdec.policy import Patience, Prices
from specdec.registry import make_drafter
from specdec.target import Target

__all__ = ["PARTS", "Bandit", "Merged", "MergedConfig", "Part", "Record", "Tree", "kind_of", "part_of"]

PARTS: tuple[Any, ...] = (
    {"name": "suffix_automaton", "factor": 4.0, "max_tokens": 16},
    "token_recycling",
)
"""The parts where none are named: what needs no weights and no datastore, the cheapest first.

Lookahead beside them brought one token in a hundred steps where rows are free, and cost more than that elsewhere.
"""

_DEPTHS, _RANKS, _MATCHES = 8, 4, 6
_KINDS = (_MATCHES + 1) * _RANKS * 2 * (_DEPTHS + 1)

# What is supposed before any was seen. Of a first rank by its draft's match: of 0, 1, 2-3, 4-7, ... tokens; then of a
# lower rank, and of a row that contradicts a part before it, beside a first rank.
_BY_MATCH = (0.35, 0.3, 0.45, 0.6, 0.75, 0.85, 0.9)
_BY_RANK = (1.0, 0.35, 0.2, 0.1)
_DISSENT = 0.3
_ONWARD = 0.6  # at least this after a row that was right
_WEIGHT = 3.0  # of what is supposed, in rows seen

# Tokens a step that a part with much to compute may bring, by the rows of its tree, of which those that pay are taken.
_HOPES = [0.3 * (1 - 0.6**rows) for rows in range(1, 9)]
_FAINT = 0.03  # a row that is reached more rarely than this is not considered, whatever rows cost
_GRACE = 0.05  # of a part that has little to compute
_SURE = 4.0  # rows that are supposed to have held what they promised, before any was taken
_LEAST_SURE = 0.01  # of what is promised so much is believed whatever came of it, or nothing would ever be taken again
_DEBT = 0.01  # tokens a step that a part may lose, on average of late, before it sleeps

_NO_ROWS = frozenset[int]()


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedConfig:
    """Options of a drafter that merges others' trees.

    Attributes:
        parts: drafters, each a name or ``{"name": ..., **options}``, the cheapest first: a row that two of them propose
            is put down to the first. None takes suffix automaton and token recycling, and under ``auto`` the
            Medusa heads in this package where they fit the model.
        rows: most rows below the root, of all parts together; None leaves it to the engine.
        memory: weight of the past in a part's worth and in a row's chance, from one step to the next.
    """

    parts: list[Any] | None = None
    rows: int | None = None
    memory: float = 0.96

    drafter: ClassVar[str]
    """Its name."""

    def __post_init__(self) -> None:
        if self.parts is not None and not self.parts:
            raise ConfigError(f"{self.drafter}.parts is empty; name at least one drafter, or leave it out")
        check_positive(f"{self.drafter}.", rows=self.rows)
        if not 0 <= self.memory < 1:
            raise ConfigError(f"{self.drafter}.memory is {self.memory}; it must be in [0, 1)")


class Bandit:
    """What is known of a part: how its rows have fared, and what it has been worth lately, in tokens a step.

    Args:
        part: the drafter.
        memory: weight of the past, from one step or row to the next.
    """

    def __init__(self, part: Drafter, memory: float) -> None:
        self._memory, self._fixed_rows = memory, part.fixed_cost_rows
        self._hits, self._tries = [0.0] * _KINDS, [0.0] * _KINDS
        self._net: float | None = None  # until the prices of its first step are known
        # A part that has no model to run is simply tried, one that has waits until it may pay.
        self._computes = bool(part.taps)
        # What a model brings comes rarely and is much, what it takes comes every time: few steps say little of it.
        self._lasting = memory**0.25 if part.taps else memory
        self._patience = Patience(32, 256) if part.taps else Patience(4, 32)

    def chance(self, kind: int, supposed: float) -> float:
        """That such a row is right where its parent is; ``supposed``: of a kind of which nothing is known."""
        tries = self._tries[kind]
        return (self._hits[kind] + _WEIGHT * supposed) / (tries + _WEIGHT) if tries else supposed

    def reach(self, match: int, rows: int, least: float) -> list[float]:
        """Of a path of first ranks the chance that each row is reached, as far as it is not below the ``least``."""
        first, supposed, reached, found = kind_of(match, 0, 0, False), _BY_MATCH[match], 1.0, list[float]()
        for depth in range(1, rows + 1):
            chance = self.chance(first + min(depth, _DEPTHS), supposed)
            reached *= chance
            if reached < least:
                break
            found.append(reached)
            supposed = max(chance, _ONWARD)
        return found

    def note(self, kind: int, right: bool) -> None:
        """One more such row, whose parent was right."""
        self._hits[kind] = self._memory * self._hits[kind] + right
        self._tries[kind] = self._memory * self._tries[kind] + 1

    def awake(self, prices: Prices, length: int) -> bool:
        """Whether to ask the part for this step; before anything was seen what a draft costs decides."""
        if self._net is None:
            hope = _GRACE
            if self._computes:
                hope = max(own - prices.price(length, rows) for rows, own in enumerate(_HOPES, 2))
            self._net = hope - prices.drafting(0.0, self._fixed_rows, length)
        if self._net > -_DEBT:
            return True
        # Those who decode together are woken together, and each of them then pays for the try.
        if not self._patience.due(1 / prices.crowd.sequences):
            return False
        self._net = 0.0  # a few disappointments, and it sleeps again
        return True

    def judge(self, prices: Prices, length: int, *, net: float, seconds: float, cost: float) -> None:
        """Take note of a step: tokens that its rows brought less their price, seconds of drafting, the draft's cost."""
        assert self._net is not None
        net -= prices.drafting(seconds, self._fixed_rows, length, cost)
        self._net = self._lasting * self._net + (1 - self._lasting) * net
        if self._net > 0.05:
            self._patience.paid()


class Record:
    """What is known of the parts: each one's bandit, and how far their promises are believed.

    Args:
        parts: the drafters.
        memory: weight of the past, from one step or row to the next.
    """

    def __init__(self, parts: Sequence[Drafter], memory: float) -> None:
        self.bandits = [Bandit(part, memory) for part in parts]
        self._memory = memory
        self._right = self._promised = _SURE

    @property
    def sure(self) -> float:
        """Rows that were right, for one that was promised when they were taken: the best of many opinions promise more
        than they hold."""
        return max(self._right / self._promised, _LEAST_SURE)

    def learn(self, promised: float, right: int) -> None:
        """Of the rows that were taken in a step, how many were expected to be right, and how many were."""
        memory = self._memory
        self._right, self._promised = memory * self._right + right, memory * self._promised + promised


class Merged(DrafterBase):
    """The parts, and the record of them, which sequences share unless their text depends on it."""

    draws = False

    def __init__(self, config: MergedConfig, parts: Sequence[Drafter]) -> None:
        super().__init__(config)
        self.parts = parts
        self.taps = frozenset[int]().union(*(part.taps for part in parts))
        self.likeliest = max(part.likeliest for part in parts)
        self.record = Record(parts, config.memory)

    @classmethod
    def build(cls, config: MergedConfig, target: Target) -> Merged:
        """Make the parts for a target.

        Raises:
            ConfigError: an unknown drafter or option.
        """
        return cls(config, cls.made(config, target))

    @classmethod
    def made(cls, config: MergedConfig, target: Target) -> list[Drafter]:
        """The parts that ``config`` names, or the usual ones."""
        return [make_drafter(part, target) for part in config.parts or PARTS]

    def start(self, context: Context) -> MergedSession:
        return MergedSession(self, context)


class Tree:
    """All that the parts propose, equal paths once: per row its token, parent and the chance that it is reached."""

    __slots__ = ("heirs", "is_chain", "needed", "parents", "probes", "reach", "rows", "tokens")

    rows: dict[tuple[int, int], int]  # parent and token -> row
    heirs: dict[int, int]  # row -> its first child

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.reach = [root], [-1], [1.0]
        self.probes = self.needed = _NO_ROWS
        self.is_chain = True  # of candidates, which nothing was ever put beside

    def extend(self, tokens: Sequence[int], reach: Sequence[float]) -> None:
        """Put a path of candidates below the root, where nothing else is yet."""
        self.tokens += tokens
        self.parents += range(len(tokens))
        self.reach += reach

    def find(self) -> None:
        """Have all rows in ``rows`` and ``heirs``, those of ``extend`` too."""
        if self.is_chain:
            self.rows = {(row - 1, self.tokens[row]): row for row in range(1, len(self.tokens))}
            self.heirs = {row: row + 1 for row in range(len(self.tokens) - 1)}
            self.is_chain = False

    def put(self, row: int, parent: int, token: int, reach: float, candidate: bool) -> int:
        """Have the ``row`` that was found, or a new one; the better of two opinions counts."""
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
        """Have a row verified with its ancestors, whatever it is worth."""
        while row > 0 and row not in self.needed:
            self.needed |= {row}
            row = self.parents[row]

    def best(self, most: int) -> list[int]:
        """The rows that need not be there, the likeliest ones first, so that parents come before their children."""
        rest = [*range(1, len(self.tokens))]
        if self.probes or self.needed:
            rest = [row for row in rest if row not in self.probes and row not in self.needed]
        if not self.is_chain:
            rest.sort(key=self.reach.__getitem__, reverse=True)
        return rest[:most]


class Part:
    """A part in one sequence: its session, its latest draft and where that draft's rows went."""

    __slots__ = (
        "added",
        "asked",
        "bandit",
        "draft",
        "kinds",
        "maps",
        "name",
        "rows",
        "seconds",
        "session",
        "taps",
        "told",
    )

    def __init__(self, drafter: Drafter, bandit: Bandit, context: Context) -> None:
        self.name, self.taps = drafter.name, drafter.taps
        self.told = bool(drafter.taps) or drafter.needs_observe
        self.maps = drafter.needs_draft
        self.bandit = bandit
        self.session = session_of(drafter, context)
        self.asked = False
        self.draft = Draft.chain([context.root])
        self.rows = [0]  # own row -> row of the tree; -1: left out
        self.kinds = [0]  # of its own rows; a row's kind is a number below _KINDS
        self.added = range(0)  # rows of the tree that no part before it proposed
        self.seconds = 0.0

    def place(self, tree: Tree, least: float) -> None:
        """Put its rows into the tree, each with the chance that it is reached, but none of less than the ``least``.

        The first row of a path that is left out is judged all the same, as it may become better.
        """
        draft, first = self.draft, len(tree.tokens)
        if len(draft) == 1:
            self.rows, self.kinds, self.added = [0], [0], range(0)
            return
        match = min(draft.match_length.bit_length(), _MATCHES)
        if draft.is_chain and first == 1 and not (draft.read or draft.probes or draft.chances):
            self._lay(tree, least, match)
        else:
            self._merge(tree, least, match)
        self.added = range(first, len(tree.tokens))

    def _lay(self, tree: Tree, least: float, match: int) -> None:
        """What ``_merge`` does, for a chain of candidates where nothing else is yet."""
        tokens, first = self.draft.tokens, kind_of(match, 0, 0, False)
        reach = self.bandit.reach(match, len(tokens) - 1, least)
        size = len(reach) + 1
        tree.extend(tokens[1:size], reach)
        self.rows = [*range(size), *[-1] * (len(tokens) - size)]
        self.kinds = [first + min(own, _DEPTHS) for own in range(min(size + 1, len(tokens)))]

    def _merge(self, tree: Tree, least: float, match: int) -> None:
        draft, first, chance_of, told = self.draft, len(tree.tokens), self.bandit.chance, self.draft.chances
        size, probes = len(draft), draft.probes
        self.rows, self.kinds = rows, kinds = [0], [0]
        chances, ranks = [1.0], [0] * size
        if draft.read:  # what a row of which is read has all its ancestors verified
            least = 0.0
        tree.find()
        known, heirs, reaches = tree.rows, tree.heirs, tree.reach
        every = zip(range(size), draft.tokens, draft.parents, draft.depths, strict=True)
        for own, token, above, depth in islice(every, 1, None):
            parent, rank = rows[above], ranks[above]
            if parent < 0:
                rows.append(-1)
                kinds.append(0)
                chances.append(0.0)
                continue
            ranks[above] = rank + 1
            row = known.get((parent, token), -1)
            # Parts before it say something else after ``parent``, and none of them says this.
            dissents = not 0 <= row < first and heirs.get(parent, first) < first
            rank, deep = (rank if rank < _RANKS else _RANKS - 1), (depth if depth < _DEPTHS else _DEPTHS)
            kind = kind_of(match, deep, rank, dissents)
            if told:
                chance = told[own]
            else:
                supposed = (max(chances[above], _ONWARD) if depth > 1 else _BY_MATCH[match]) * _BY_RANK[rank]
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
        """Note which of its rows were right, by the tokens that the step emitted."""
        draft, note, size, right = self.draft, self.bandit.note, len(text), [True]
        rows = zip(self.kinds, self.rows, draft.tokens, draft.parents, draft.depths, strict=False)  # as far as kinds go
        for kind, row, token, parent, depth in islice(rows, 1, None):
            if depth <= size and right[parent]:
                hit = token == text[depth - 1]
                note(kind, hit)
                right.append(hit and row >= 0)  # of what was left out, the children are of no kind
            elif draft.is_chain:
                break
            else:
                right.append(False)


def kind_of(match: int, depth: int, rank: int, dissents: bool) -> int:
    """Rows of one kind are judged alike; ``match``: the bits of its length. Kinds of a path follow one another."""
    return ((match * _RANKS + rank) * 2 + dissents) * (_DEPTHS + 1) + depth


class MergedSession(BatchedSession):
    """One sequence's parts. Without a policy all of them are asked; a drafter that plans keeps the rows that pay."""

    def __init__(self, drafter: Merged, context: Context) -> None:
        self._drafter, self._context, self._name = drafter, context, drafter.name
        self._record = Record(drafter.parts, drafter.config.memory) if context.isolated else drafter.record
        self._prices = None if context.policy is None else context.policy.prices
        # As a part of a union without a policy it takes what there is room for, as the union does.
        self._planned = self._prices if drafter.plans_rows else None
        pairs = zip(drafter.parts, self._record.bandits, strict=True)
        self._parts = [Part(part, bandit, context) for part, bandit in pairs]
        self._most = drafter.config.rows or context.max_rows
        self._length = 0
        self._asked: list[tuple[Part, int]] = []  # those that read numbers of the latest step, and how many
        self._rows: Sequence[int] = [0]  # of the tree, that the draft took, ascending
        self._draft = Draft.chain([context.root])
        self._needed = _NO_ROWS  # rows of the tree that were taken whatever they promised
        self._promised = 0.0  # rows that were to be right of those that were taken for what they promised

    def passes(self, room: int) -> Passes[Draft]:
        context, prices, waited = self._context, self._prices, self._context.waited
        length = context.cache.length
        self._length, self._promised = length, 0.0
        room = min(room, self._most + 1)
        tree, cost, least = Tree(context.root), 0.0, 0.0
        if self._planned is not None and room > 1:  # no row is taken that is not worth what the cheapest one costs
            least = max(_FAINT, self._planned.least(length, room) / self._record.sure)
        for part in self._parts:
            part.asked = room > 1 and (prices is None or part.bandit.awake(prices, length))
            if not part.asked:
                continue
            left, began = room - len(tree.needed), perf_counter() - waited.others
            part.draft = yield from proposing(part.session, left, part.name, context.target)
            if part.draft.entry is not None:
                raise ConfigError(
                    f"{self._name} cannot take {part.name!r}: its rows enter the target at layer "
                    f"{part.draft.entry.layer}, other parts' rows at the embedding; leave it out of {self._name}.parts"
                )
            part.place(tree, least)
            part.seconds = perf_counter() - waited.others - began
            cost += part.draft.cost
        self._needed = needed = tree.needed
        best = tree.best(room - 1 - len(needed))
        if best and self._planned is not None:
            gains = [tree.reach[row] for row in best]
            count = self._planned.keep(gains, length, base=1 + len(needed), share=self._record.sure)
            self._promised = sum(gains[:count])
            del best[count:]
        size = 1 + len(needed) + len(best)
        if tree.is_chain:
            self._rows, self._draft = range(size), Draft(tree.tokens[:size], range(-1, size - 1), cost=cost)
        else:
            self._rows = [0, *sorted([*needed, *best])]
            self._draft = self._taken(tree, cost)
        return self._draft

    def _taken(self, tree: Tree, cost: float) -> Draft:
        """The rows that were taken."""
        rows, kept = self._rows, {row: number for number, row in enumerate(self._rows)}
        probes, read = _NO_ROWS, set[int]()
        if tree.needed:
            probes = frozenset(kept[row] for row in tree.needed & tree.probes)
            read = {kept[part.rows[own]] for part in self._parts if part.asked for own in part.draft.read}
        tokens, parents = [tree.tokens[row] for row in rows], [kept[tree.parents[row]] for row in rows[1:]]
        return Draft(tokens, [-1, *parents], probes=probes, read=sorted(read), cost=cost)

    def ask(self, question: Question) -> torch.Tensor | None:
        """What the parts ask of the whole step, one answer after the other."""
        self._asked, answers = [], list[torch.Tensor]()
        for part in self._parts:
            if isinstance(part.session, AskingSession):
                answer = part.session.ask(replace(question, taps={layer: question.taps[layer] for layer in part.taps}))
                if answer is not None:
                    answers.append(answer.flatten().to(question.scores.logits.device))
                    self._asked.append((part, answer.numel()))
        return torch.cat(answers) if answers else None

    def observe(self, seen: Observation) -> None:
        answers: dict[Part, Sequence[int]] = {}
        first = 0
        for part, count in self._asked if seen.answer is not None else ():
            assert seen.answer is not None
            answers[part], first = seen.answer[first : first + count], first + count
        accepted: Sequence[int] = ()  # rows of the tree
        whole = seen.draft
        # As a part of another union: rows beyond ours were appended, or it slept, and the step is none of ours.
        if whole is not None and (whole is self._draft or _begins_with(whole, self._draft)):
            rows, size = self._rows, len(self._rows)
            accepted = [rows[row] for row in seen.path if row < size]
            if self._promised:
                self._record.learn(self._promised, len(accepted) - 1 - len(self._needed.intersection(accepted)))
        for part in self._parts:
            if part.asked and accepted:
                self._judge(part, seen, answers.get(part), accepted)
            elif part.taps:  # it sees the hidden states of all tokens
                self._show(part, seen, answers.get(part))

    def _judge(self, part: Part, seen: Observation, answer: Sequence[int] | None, accepted: Sequence[int]) -> None:
        """Judge a part that was asked by what became of its rows, and let it learn; ``accepted``: rows of the tree."""
        began, rows, prices = perf_counter(), self._rows, self._prices
        part.judge(seen.tokens)
        if part.told and part.maps:
            kept = {row: number for number, row in enumerate(rows)}
            own = seen if seen.answer is None else replace(seen, answer=answer)
            part.session.observe(part_of(own, part.draft, [kept.get(row, -1) for row in part.rows], part.taps))
        elif part.told:
            self._show(part, seen, answer)
        if prices is not None:
            net, size = 0.0, len(rows)
            if size > 1 and part.added:
                mine = part.added.__contains__
                net = sum(map(mine, accepted)) - prices.price(self._length, size, size - sum(map(mine, rows)))
            part.bandit.judge(
                prices, self._length, net=net, seconds=part.seconds + perf_counter() - began, cost=part.draft.cost
            )

    def _show(self, part: Part, seen: Observation, answer: Sequence[int] | None) -> None:
        """Have a part observe the step as it was, but of the taps its own, and its own answer."""
        if seen.answer is not None or part.taps != self._drafter.taps:
            taps = {layer: seen.taps[layer] for layer in part.taps}
            seen = Observation(seen.draft, seen.path, seen.tokens, seen.scores, taps, answer)
        part.session.observe(seen)


def _begins_with(draft: Draft, own: Draft) -> bool:
    size = len(own)
    return [*draft.tokens[:size]] == [*own.tokens] and [*draft.parents[:size]] == [*own.parents]


def part_of(seen: Observation, draft: Draft, rows: Sequence[int], taps: Collection[int]) -> Observation:
    """What became of ``draft``, whose row i was row ``rows[i]`` of the whole, with the taps that its part wants.

    Where the accepted path leaves the part's own rows, the missing ones are appended to its draft, so that path, tokens
    and taps fit together as if the part had proposed them too. A row that was left out, -1, counts as a probe that
    nobody reads, and its taps mean nothing.
    """
    whole, path, scores = seen.draft, seen.path, seen.scores
    assert whole is not None
    assert scores is not None
    unscored = whole.probes.difference(whole.read)
    if rows == [*range(len(whole))] and unscored <= draft.probes:  # it had the step for itself
        hidden = {layer: seen.taps[layer] for layer in taps}
        return Observation(draft, list(path), seen.tokens, scores, hidden, seen.answer)
    if len(rows) == 1:  # it had none of it: all that concerns it is the text
        chain = Draft.chain([whole.tokens[row] for row in path])
        hidden = {layer: _rows(seen.taps[layer], path) for layer in taps}
        return Observation(chain, range(len(path)), seen.tokens, scores.select(path, None), hidden, seen.answer)
    others = [row for row in path if row not in rows]  # its end, as what is behind another's row is not the part's
    union_rows = [*rows, *others]
    path = [union_rows.index(row) for row in path]  # the first of equal rows
    size = len(union_rows)
    probes = draft.probes.difference(path) | {own for own, row in enumerate(rows) if row < 0 or row in unscored}
    if others:
        tokens = [*draft.tokens, *(whole.tokens[row] for row in others)]
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
    return Observation(own_draft, path, seen.tokens, scores, hidden, seen.answer)


def _rows(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of what nobody changes; the first ones, in order, need no copy."""
    return hidden[: len(rows)] if [*rows] == [*range(len(rows))] else copies.pick(hidden, rows)
