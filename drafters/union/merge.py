"""Merge: the trees of several drafters in one tree, and a record of each drafter's gain.

Equal paths share rows. The probability of a row is estimated from earlier rows of its kind: of the same part, match
length, depth and rank. The probability to reach a row is the product along its path, and the best rows are taken. A
part whose accepted rows do not outweigh the price of its rows and of its drafting sleeps, and is woken now and then.
All of this depends on finished steps only.

A row that was not taken is recorded as well if its parent was accepted, as the text shows whether it was right. So an
improvement is noticed without paying for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from drafters.shared.calibration import Calibration
from drafters.union.bandit import Bandit
from drafters.union.parts import NO_ROWS, MergedPart, Tree, part_of
from specdec.drafter import (
    BatchedSession,
    Context,
    DeviceStep,
    Drafter,
    DrafterBase,
    Observation,
    ReadbackSession,
    RestingSession,
    warm_up,
)
from specdec.drafting.registry import make_drafter
from specdec.drafting.sessions import proposing
from specdec.errors import ConfigError
from specdec.settings.parsing import check_positive
from specdec.step.forward_passes import Passes
from specdec.step.tree import Draft, Hints
from specdec.target import Target

__all__ = ["PARTS", "Merged", "MergedConfig", "Record"]

PARTS: tuple[Any, ...] = (
    {"name": "suffix_automaton", "factor": 4.0, "max_tokens": 16},
    "token_recycling",
)
"""The parts where none are named: what needs no weights and no datastore, the cheapest first.

Lookahead beside them brought one token in a hundred steps where rows are free, and cost more than that elsewhere.
"""
_FAINT = 0.03  # a row with a smaller probability is not considered, whatever rows cost
_SURE = 4.0  # weight of the prior that probabilities are right, in rows
_LEAST_SURE = 0.01  # least factor on probabilities; with 0 no row would ever be taken again


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedConfig:
    """Options of a drafter that merges others' trees.

    Attributes:
        parts: drafters, each a name or ``{"name": ..., **options}``, the cheapest first: a row that two parts propose
            counts for the first one. None takes suffix automaton and token recycling, and under ``auto`` also the
            Medusa heads in this package if they fit the model.
        rows: most rows below the root, of all parts together; None leaves it to the engine.
        memory: weight of the past in a part's gain and in a row's probability, from one step to the next.
    """

    parts: list[Any] | None = None
    rows: int | None = None
    memory: float = 0.96

    drafter: ClassVar[str]
    """The drafter's name."""

    def __post_init__(self) -> None:
        if self.parts is not None and not self.parts:
            raise ConfigError(f"{self.drafter}.parts is empty; name at least one drafter, or leave it out")
        check_positive(f"{self.drafter}.", rows=self.rows)
        if not 0 <= self.memory < 1:
            raise ConfigError(f"{self.drafter}.memory is {self.memory}; it must be in [0, 1)")


class Record:
    """The record of all parts: a bandit for each, and a common factor on their probabilities.

    Args:
        parts: the drafters.
        memory: weight of the past, from one step or row to the next.
    """

    def __init__(self, parts: Sequence[Drafter], memory: float) -> None:
        self.bandits = [Bandit(part, memory) for part in parts]
        self._calibration = Calibration(_SURE, _SURE, memory)
        self.learn = self._calibration.learn

    @property
    def sure(self) -> float:
        """Accepted rows per expected row. It is below 1 because the largest of many estimates are too large."""
        return max(self._calibration.share, _LEAST_SURE)


class Merged(DrafterBase):
    """A merged drafter: its parts and their record, which sequences share unless their text depends on it."""

    draws = False

    def __init__(self, config: MergedConfig, parts: Sequence[Drafter]) -> None:
        super().__init__(config)
        self.parts = parts
        self.taps = frozenset[int]().union(*(part.taps for part in parts))
        self.top_k = max(part.top_k for part in parts)
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
        """The parts that ``config`` names, or the default ones."""
        return [make_drafter(part, target) for part in config.parts or PARTS]

    def warm_up(self, target: Target, rows: int, sequences: int) -> None:
        for part in self.parts:
            warm_up(part, target, rows, sequences)

    def start(self, context: Context) -> MergedSession:
        return MergedSession(self, context)


class MergedSession(BatchedSession):
    """One sequence's parts. Without a row policy all parts draft; ``auto`` keeps only the rows that pay."""

    def __init__(self, drafter: Merged, context: Context) -> None:
        self._drafter, self._context, self._name = drafter, context, drafter.name
        self._record = Record(drafter.parts, drafter.config.memory) if context.isolated else drafter.record
        self._prices = None if context.policy is None else context.policy.prices
        # ``auto`` as a part of a union without a policy takes as many rows as there is room for, as the union does.
        self._planned = self._prices if drafter.plans_rows else None
        pairs = zip(drafter.parts, self._record.bandits, strict=True)
        self._parts = [MergedPart(part, bandit, context) for part, bandit in pairs]
        self._most = drafter.config.rows or context.max_rows
        self._length = 0
        if all(isinstance(part.session, RestingSession) for part in self._parts if part.taps):
            self.missed = self._missed
        self._readbacks: list[tuple[MergedPart, int]] = []  # parts with a readback in the latest step, and its size
        self._rows: Sequence[int] = [0]  # rows of the tree that are in the draft, ascending
        self._draft = Draft.chain([context.root])
        self._needed = NO_ROWS  # rows of the tree that were taken whatever their probability
        self._promised = 0.0  # expected number of accepted rows among the others

    def passes(self, row_budget: int) -> Passes[Draft]:
        context, prices = self._context, self._prices
        length = context.cache.length
        self._length, self._promised = length, 0.0
        row_budget = min(row_budget, self._most + 1)
        tree, cost, least = Tree(context.root), 0.0, 0.0
        if self._planned is not None and row_budget > 1:
            # A row with a smaller expected gain than the cheapest row's price never pays.
            least = max(_FAINT, self._planned.least(length, row_budget) / self._record.sure)
        for part in self._parts:
            part.active = row_budget > 1 and (prices is None or part.bandit.awake(prices, length))
            if not part.active:
                continue
            left = row_budget - len(tree.needed)
            part.draft = (yield from proposing(part.session, left, part.name, context.target)).on_host()
            if part.draft.entry is not None:
                raise ConfigError(
                    f"{self._name} cannot take {part.name!r}: its rows enter the target at layer "
                    f"{part.draft.entry.layer}, other parts' rows at the embedding; leave it out of {self._name}.parts"
                )
            part.place(tree, least)
            cost += part.draft.hints.cost
        self._needed = needed = tree.needed
        best = tree.best(row_budget - 1 - len(needed))
        if best and self._planned is not None:
            gains = [tree.reach[row] for row in best]
            count = self._planned.keep(gains, length, base=1 + len(needed), share=self._record.sure)
            self._promised = sum(gains[:count])
            del best[count:]
        size = 1 + len(needed) + len(best)
        if tree.is_chain:
            self._rows, self._draft = (
                range(size),
                Draft(tree.tokens[:size], range(-1, size - 1), hints=Hints(cost=cost)),
            )
        else:
            self._rows = [0, *sorted([*needed, *best])]
            self._draft = self._taken(tree, cost)
        return self._draft

    def _taken(self, tree: Tree, cost: float) -> Draft:
        """The draft of the rows that were taken."""
        rows, kept = self._rows, {row: number for number, row in enumerate(self._rows)}
        probes, read = NO_ROWS, set[int]()
        if tree.needed:
            probes = frozenset(kept[row] for row in tree.needed & tree.probes)
            read = {kept[part.rows[own]] for part in self._parts if part.active for own in part.draft.read}
        tokens, parents = [tree.tokens[row] for row in rows], [kept[tree.parents[row]] for row in rows[1:]]
        return Draft(tokens, [-1, *parents], probes=probes, read=sorted(read), hints=Hints(cost=cost))

    def sources(self) -> list[str]:
        """Per row of the latest draft the first part that proposed it."""
        names = {row: part.name for part in self._parts if part.active for row in part.added}
        return [names.get(row, self._name) for row in self._rows]

    def readback(self, step: DeviceStep) -> torch.Tensor | None:
        """The readbacks of all parts, one after the other."""
        self._readbacks, readbacks = [], list[torch.Tensor]()
        for part in self._parts:
            if isinstance(part.session, ReadbackSession):
                readback = part.session.readback(step)
                if readback is not None:
                    readbacks.append(readback.flatten().to(step.root.device))
                    self._readbacks.append((part, readback.numel()))
        return torch.cat(readbacks) if readbacks else None

    def _missed(self) -> None:
        """Tell the parts that read hidden states that some are not known."""
        for part in self._parts:
            if part.taps and isinstance(part.session, RestingSession):
                part.session.missed()

    def observe(self, seen: Observation) -> None:
        readbacks: dict[MergedPart, Sequence[int]] = {}
        first = 0
        for part, count in self._readbacks if seen.readback is not None else ():
            assert seen.readback is not None
            readbacks[part], first = seen.readback[first : first + count], first + count
        accepted: Sequence[int] = ()  # rows of the tree
        merged = seen.draft
        # As a part of another union: rows beyond ours were appended, or it slept, and the step is none of ours.
        if merged is not None and (merged is self._draft or _begins_with(merged, self._draft)):
            rows, size = self._rows, len(self._rows)
            accepted = [rows[row] for row in seen.path if row < size]
            if self._promised:
                self._record.learn(self._promised, len(accepted) - 1 - len(self._needed.intersection(accepted)))
        for part in self._parts:
            if part.active and accepted:
                self._judge(part, seen, readbacks.get(part), accepted)
            elif part.taps:  # a part with taps needs the hidden states of all tokens
                self._show(part, seen, readbacks.get(part))

    def _judge(
        self, part: MergedPart, seen: Observation, readback: Sequence[int] | None, accepted: Sequence[int]
    ) -> None:
        """Record what became of a part's rows, and let the part observe them; ``accepted``: rows of the tree."""
        rows, prices = self._rows, self._prices
        part.judge(seen.tokens)
        if part.observes and part.maps:
            kept = {row: number for number, row in enumerate(rows)}
            own = seen if seen.readback is None else replace(seen, readback=readback)
            part.session.observe(part_of(own, part.draft, [kept.get(row, -1) for row in part.rows], part.taps))
        elif part.observes:
            self._show(part, seen, readback)
        if prices is not None:
            is_own, size = part.added.__contains__, len(rows)
            tokens, base = sum(map(is_own, accepted)), size - sum(map(is_own, rows))
            part.bandit.judge(prices, self._length, tokens=tokens, rows=size, base=base, cost=part.draft.hints.cost)

    def _show(self, part: MergedPart, seen: Observation, readback: Sequence[int] | None) -> None:
        """Let a part observe the whole step, with its own taps and its own readback."""
        if seen.readback is not None or part.taps != self._drafter.taps:
            taps = {layer: seen.taps[layer] for layer in part.taps}
            seen = Observation(seen.draft, seen.path, seen.tokens, seen.scores, taps, readback)
        part.session.observe(seen)


def _begins_with(draft: Draft, own: Draft) -> bool:
    size = len(own)
    return [*draft.tokens[:size]] == [*own.tokens] and [*draft.parents[:size]] == [*own.parents]
