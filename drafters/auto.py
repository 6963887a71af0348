"""Auto: every source of guesses at once, and of their rows those that pay on this machine.

Each part's rows are judged by how such rows have fared: of that part, with a match of that strength, at that depth and
rank. The chance of a row is the product along its path; the best rows are taken as long as what they bring exceeds what
their time would have brought otherwise (see :mod:`specdec.budget`), down to none, which is a plain step. A part whose
accepted rows do not earn its own time sleeps, and is woken now and then.

A row that was not taken is judged all the same where its parent was accepted: the text says whether it was right. So
a change for the better is noticed without paying for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from drafters.union import part_of
from specdec.budget import Budget, Patience, make_budget
from specdec.draft import Draft
from specdec.drafter import Context, Drafter, DrafterBase, DraftSession, Observation
from specdec.errors import CheckpointError, ConfigError
from specdec.registry import make_drafter
from specdec.target import Target

__all__ = ["Auto", "AutoConfig", "Record"]

_PARTS: tuple[Any, ...] = (
    {"name": "suffix_automaton", "factor": 4.0, "max_tokens": 16},
    "token_recycling",
    "lookahead",
)
_DEPTHS, _RANKS, _STRENGTHS = 8, 4, 6

Kind = tuple[int, int, int, bool]  # strength, depth, rank, dissent

# What is supposed before any was seen. Of a first rank by the bits of its draft's strength: a match of 0, 1, 2-3, 4-7,
# ... tokens; then of a lower rank, and of a row that contradicts a part before it, beside a first rank.
_BY_STRENGTH = (0.35, 0.3, 0.45, 0.6, 0.75, 0.85, 0.9)
_BY_RANK = (1.0, 0.35, 0.2, 0.1)
_DISSENT = 0.3
_ONWARD = 0.6  # at least this after a row that was right
_WEIGHT = 3.0  # of what is supposed, in rows seen

_HOPE, _TREE = 0.3, 9  # tokens a step that a part with much to compute may bring; rows of the tree that it may make
_FAINT = 0.03  # below a row that is reached more rarely than this, none will pay
_GRACE = 0.05  # of a part that has little to compute
_DEBT = 0.01  # tokens a step that a part may lose, on average of late, before it sleeps


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """Options.

    Attributes:
        parts: drafters, each a name or ``{"name": ..., **options}``, the cheapest first: a row that two of them propose
            is put down to the first. None takes suffix automaton, token recycling, lookahead, and the Medusa heads in
            this package where they fit the model.
        rows: most rows below the root; None leaves it to the engine's ``max_rows``.
        memory: weight of the past in a part's worth and in a row's chance, from one step to the next.
    """

    parts: list[Any] | None = None
    rows: int | None = None
    memory: float = 0.96

    def __post_init__(self) -> None:
        if self.parts is not None and not self.parts:
            raise ConfigError("auto.parts is empty; name at least one drafter, or leave it out")
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"auto.rows is {self.rows}; it must be at least 1")
        if not 0 < self.memory < 1:
            raise ConfigError(f"auto.memory is {self.memory}; it must be in (0, 1)")


class Record:
    """How rows have fared, by strength, depth, rank, and whether they contradict a part before."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._seen: dict[Kind, list[float]] = {}  # hits, tries

    def chance(self, kind: Kind, above: float) -> float:
        """That such a row is right where its parent is; ``above``: the parent's own such chance."""
        strength, depth, rank, dissents = kind
        supposed = (max(above, _ONWARD) if depth > 1 else _BY_STRENGTH[strength]) * _BY_RANK[rank]
        if dissents:
            supposed *= _DISSENT
        seen = self._seen.get(kind)
        if seen is None:
            return supposed
        return (seen[0] + _WEIGHT * supposed) / (seen[1] + _WEIGHT)

    def note(self, kind: Kind, right: bool) -> None:
        """One more such row, whose parent was right."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        seen[0] = self._memory * seen[0] + right
        seen[1] = self._memory * seen[1] + 1


class Auto(DrafterBase):
    """The parts, and what is known of them; sequences share it."""

    name = "auto"
    Config = AutoConfig
    budgeted = True

    def __init__(self, config: AutoConfig, parts: Sequence[Drafter]) -> None:
        super().__init__(config)
        self.parts = parts
        self.taps = frozenset[int]().union(*(part.taps for part in parts))
        self.worths = [Worth(config.memory, cheap=not getattr(part, "learns", True)) for part in parts]

    @classmethod
    def build(cls, config: AutoConfig, target: Target) -> Auto:
        """Make the parts for a target.

        Raises:
            ConfigError: an unknown drafter or option.
        """
        if config.parts is not None:
            return cls(config, [make_drafter(part, target) for part in config.parts])
        parts = [make_drafter(part, target) for part in _PARTS]
        with suppress(CheckpointError):  # the heads in the package may be for another model
            parts.append(make_drafter("medusa", target))
        return cls(config, parts)

    def start(self, context: Context) -> AutoSession:
        return AutoSession(self, context)


class Worth:
    """What a part has been worth lately, in tokens a step: what it brought, less the price of its rows and its time."""

    def __init__(self, memory: float, *, cheap: bool) -> None:
        self.record = Record(memory)
        self._memory = memory
        self._net: float | None = _GRACE if cheap else None
        self._patience = Patience(4, 32) if cheap else Patience(32, 256)

    def awake(self, price: float) -> bool:
        """Whether to ask it for this step; ``price``: of a tree's rows, which decides before anything was seen."""
        if self._net is None:
            self._net = _HOPE - price
        if self._net > -_DEBT:
            return True
        if not self._patience.due():
            return False
        self._net = 0.0  # one disappointment, and it sleeps again
        return True

    def judge(self, brought: float, price: float) -> None:
        """Take note of a step: accepted rows that nobody before it proposed, and what it cost, in tokens."""
        assert self._net is not None
        self._net = self._memory * self._net + (1 - self._memory) * (brought - price)
        if self._net > 0.05:
            self._patience.paid()


class _Tree:
    """All that the parts propose, equal paths once: per row its token, parent and the chance that it is reached."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.reach = [root], [-1], [1.0]
        self.candidates, self.needed = set[int](), set[int]()
        self._rows: dict[tuple[int, int], int] = {}
        self._heirs: dict[int, int] = {}  # row -> its first child

    def add(self, parent: int, token: int, reach: float) -> int:
        """The row of ``token`` below ``parent``, new or existing; the better of two opinions counts."""
        row = self._rows.get((parent, token))
        if row is None:
            row = self._rows[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.reach.append(reach)
            self._heirs.setdefault(parent, row)
        elif reach > self.reach[row]:
            self.reach[row] = reach
        return row

    def dissents(self, parent: int, token: int, first: int) -> bool:
        """Whether rows before ``first`` say something else after ``parent``, and none of them says this."""
        heir = self._heirs.get(parent)
        return heir is not None and heir < first and self._rows.get((parent, token), first) >= first

    def need(self, row: int) -> None:
        """Have a row verified with its ancestors, whatever it is worth."""
        while row > 0 and row not in self.needed:
            self.needed.add(row)
            row = self.parents[row]

    def best(self, most: int) -> list[int]:
        """The rows that need not be there, the likeliest ones first, so that parents come before their children."""
        rest = [row for row in range(1, len(self.tokens)) if row in self.candidates and row not in self.needed]
        rest.sort(key=self.reach.__getitem__, reverse=True)
        return rest[:most]


class _Part:
    """A part in one sequence: its session, its latest draft and where that draft's rows went."""

    def __init__(self, drafter: Drafter, worth: Worth, context: Context) -> None:
        self.name, self.taps = drafter.name, drafter.taps
        self.learns = getattr(drafter, "learns", True)
        self.worth = worth
        self.session: DraftSession = drafter.start(context)
        self.asked = False
        self.draft = Draft.chain([context.root])
        self.rows = [0]  # own row -> row of the tree
        self.kinds: list[Kind] = [(0, 0, 0, False)]  # of its own rows
        self.added = range(0)  # rows of the tree that no part before it proposed
        self.seconds = 0.0

    def propose(self, tree: _Tree, room: int) -> None:
        """Put its rows into the tree, each with the chance that it is accepted."""
        began = perf_counter()
        self.draft = draft = self.session.propose(room)
        if draft.entry is not None:
            raise ConfigError(
                f"auto cannot take {self.name!r}: its rows enter the target at layer {draft.entry.layer}, other parts' "
                "rows at the embedding; leave it out of auto.parts"
            )
        first, record, strength = len(tree.tokens), self.worth.record, min(draft.strength.bit_length(), _STRENGTHS)
        self.rows, self.kinds = [0], [(strength, 0, 0, False)]
        chances, ranks = [1.0], [0] * len(draft)
        for own in range(1, len(draft)):
            above = draft.parents[own]
            if draft.is_chain and not draft.read and tree.reach[self.rows[above]] < _FAINT:
                self.rows += [-1] * (len(draft) - own)
                break
            parent, token = self.rows[above], draft.tokens[own]
            dissents = tree.dissents(parent, token, first)
            kind = (strength, min(draft.depths[own], _DEPTHS), min(ranks[above], _RANKS - 1), dissents)
            ranks[above] += 1
            chance = record.chance(kind, chances[above])
            row = tree.add(parent, token, tree.reach[parent] * chance)
            if own not in draft.probes:
                tree.candidates.add(row)
            self.rows.append(row)
            self.kinds.append(kind)
            chances.append(chance)
        for own in draft.read:
            tree.need(self.rows[own])
        self.added = range(first, len(tree.tokens))
        self.seconds = perf_counter() - began

    def judge(self, place: dict[int, int], tokens: Sequence[int]) -> None:
        """Note which of its rows were right; ``place``: accepted row of the tree -> its depth."""
        draft, record = self.draft, self.worth.record
        for own in range(1, len(self.kinds)):
            depth = place.get(self.rows[draft.parents[own]])
            if depth is not None:
                record.note(self.kinds[own], draft.tokens[own] == tokens[depth])


class AutoSession:
    def __init__(self, drafter: Auto, context: Context) -> None:
        budget = context.budget or make_budget("auto", context.target)  # none where something hides the drafter
        assert budget is not None
        self._context = context
        self._budget: Budget = budget
        self._parts = [_Part(part, worth, context) for part, worth in zip(drafter.parts, drafter.worths, strict=True)]
        self._most = drafter.config.rows or context.max_rows
        self._length = 0
        self._tree = _Tree(context.root)
        self._kept: list[int] = [0]  # row of the draft -> row of the tree

    def propose(self, room: int) -> Draft:
        self._length = self._context.cache.length
        room = min(room, self._most + 1)
        self._tree, self._kept = _Tree(self._context.root), [0]
        tree = self._tree
        price = self._budget.price(self._length, _TREE)[_TREE]
        for part in self._parts:
            part.asked = part.worth.awake(price)
            if part.asked:
                part.propose(tree, room - len(tree.needed))
        if len(tree.tokens) == 1:
            return Draft.chain([self._context.root])
        best = tree.best(room - 1 - len(tree.needed))
        count = self._budget.keep([tree.reach[row] for row in best], self._length, base=1 + len(tree.needed))
        self._kept = [0, *sorted([*tree.needed, *best[:count]])]
        place = {row: number for number, row in enumerate(self._kept)}
        read = sorted({place[part.rows[own]] for part in self._parts if part.asked for own in part.draft.read})
        return Draft(
            [tree.tokens[row] for row in self._kept],
            [place.get(tree.parents[row], -1) for row in self._kept],
            probes=frozenset(place[row] for row in tree.needed if row not in tree.candidates),
            read=read,
        )

    def observe(self, seen: Observation) -> None:
        path = [] if seen.draft is None else [self._kept[row] for row in seen.path]
        place = {row: depth for depth, row in enumerate(path)}
        for part in self._parts:
            if part.asked and path:
                self._tell(part, seen, path, place)
            elif part.taps:  # it sees the hidden states of all tokens, and the step as it was
                shared = len(part.taps) < len(seen.taps)
                own = replace(seen, taps={layer: seen.taps[layer] for layer in part.taps}) if shared else seen
                part.session.observe(own)

    def _tell(self, part: _Part, seen: Observation, path: list[int], place: dict[int, int]) -> None:
        """Judge a part that was asked by what became of its rows, and let it learn.

        ``path``: the accepted rows of the tree; ``place``: their depths.
        """
        began = perf_counter()
        kept = self._kept
        part.judge(place, seen.tokens)
        if part.taps or part.learns:
            numbers = {row: number for number, row in enumerate(kept)}
            rows = [numbers.get(row, -1) for row in part.rows]
            part.session.observe(part_of(seen, part.draft, rows, part.taps))
        price = self._budget.price(self._length, len(kept))
        extra = price[len(kept)] - price[len(kept) - sum(row in part.added for row in kept)]
        seconds = part.seconds + perf_counter() - began
        part.worth.judge(sum(row in part.added for row in path), extra + self._budget.rate * seconds)
