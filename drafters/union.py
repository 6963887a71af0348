"""Union: several drafters' trees in one, under one budget of rows.

The paper of lookahead decoding adds prompt lookup's n-grams to its own (Fu et al. 2024, Table 3, row 9); this is that,
for any drafters. Equal paths share rows. Parts propose in turn, each within its share and what those before it left,
so nothing that a part asked for is ever cut. What a part's rows have lately been worth decides its share, and whether
it is asked at all: rows that are accepted more rarely than they cost make every step slower. Whoever is not asked is
not told how the step went either, unless it wants hidden states, and gets another try now and then. All of that follows
from steps that are over, never from the one that is drafted for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from specdec.budget import row_cost as supposed_row_cost
from specdec.draft import Draft, DraftBuilder
from specdec.drafter import Context, Drafter, DrafterBase, DraftSession, Observation
from specdec.errors import ConfigError
from specdec.registry import make_drafter
from specdec.sampling import Scores
from specdec.target import Target

__all__ = ["Union", "UnionConfig", "part_of", "parts_for", "shares"]


_PRIOR = 2  # drafts that the first belief about a part counts as


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionConfig:
    """Options.

    Attributes:
        parts: drafters, each a name or ``{"name": ..., **options}``. The first one is always asked, and later ones get
            the rows that earlier ones leave. None fits the device: prompt lookup and lookahead on an accelerator, the
            cheaper suffix automaton and token recycling on a CPU.
        rows: rows below the root, of all parts together; None fits the device: as many as the engine allows on an
            accelerator, 8 on a CPU.
        memory: weight of the past in a part's worth, from one of its drafts to the next.
        row_cost: what a row adds to a step, in plain steps: a part whose rows are accepted more rarely is not asked;
            0 asks always. None fits the device: 0.08 on a CPU, 0.002 on an accelerator.
        retry: steps after which a part that is not asked gets another try; each time in vain doubles its wait.
    """

    parts: list[Any] | None = None
    rows: int | None = None
    memory: float = 0.98
    row_cost: float | None = None
    retry: int = 16

    def __post_init__(self) -> None:
        if self.parts is not None and not self.parts:
            raise ConfigError("union.parts is empty; name at least one drafter")
        parts = len(self.parts or "12")
        if self.rows is not None and self.rows < parts:
            raise ConfigError(f"union.rows is {self.rows}; it must be at least 1 for each of {parts} parts")
        if not 0 <= self.memory < 1:
            raise ConfigError(f"union.memory is {self.memory}; it must be in [0, 1)")
        if self.row_cost is not None and not 0 <= self.row_cost < 1:
            raise ConfigError(f"union.row_cost is {self.row_cost}; it must be in [0, 1)")
        if self.retry < 1:
            raise ConfigError(f"union.retry is {self.retry}; it must be at least 1")


class Union(DrafterBase):
    """The parts, built."""

    name = "union"
    Config = UnionConfig

    def __init__(self, config: UnionConfig, parts: Sequence[Drafter]) -> None:
        super().__init__(config)
        self.parts = parts
        self.taps = frozenset[int]().union(*(part.taps for part in parts))

    @classmethod
    def build(cls, config: UnionConfig, target: Target) -> Union:
        """Make the parts for a target.

        Raises:
            ConfigError: an unknown drafter or option.
        """
        return cls(config, [make_drafter(part, target) for part in config.parts or parts_for(target)])

    def start(self, context: Context) -> UnionSession:
        return UnionSession(self.config, self.parts, context)


def parts_for(target: Target) -> list[str]:
    """The parts that pay on the target's device: where rows are dear, those that draft few and find them cheaply."""
    if target.device.type == "cpu":
        return ["suffix_automaton", "token_recycling"]
    return ["prompt_lookup", "lookahead"]


class _Record:
    """What rows of one part, in one situation, have been worth; and whether it is worth asking for more.

    Args:
        config: memory and retry.
        row_cost: of a row, in plain steps.
        worth: what is believed at first.
        fixed: rows that a draft costs beyond its own.
    """

    def __init__(self, config: UnionConfig, row_cost: float, worth: float, fixed: int) -> None:
        self._memory, self._retry, self._row_cost, self._fixed = config.memory, config.retry, row_cost, fixed
        self._accepted, self._added = worth, 1.0  # per draft, lately
        self._drafts = _PRIOR
        self._waited, self._wait = 0, config.retry

    @property
    def worth(self) -> float:
        """Accepted rows per row."""
        return self._accepted / self._added

    @property
    def pays(self) -> bool:
        """Whether its rows were accepted as often as they cost."""
        return self._accepted >= self._row_cost * (self._added + self._fixed)

    @property
    def asks(self) -> bool:
        """Whether the part is to be asked now."""
        return self.pays or self._waited >= self._wait

    def passed(self) -> None:
        """The part was not asked."""
        self._waited += 1

    def drafted(self, added: int, accepted: int) -> None:
        """Of the rows that it added, so many were accepted; a part that added nothing is not judged."""
        retried, self._waited = self._waited >= self._wait, 0
        if added:
            self._drafts += 1
            weight = max(1 - self._memory, 1 / self._drafts)  # a plain mean, until there is more than is remembered
            self._accepted += weight * (accepted - self._accepted)
            self._added += weight * (added - self._added)
            self._wait = self._retry if self.pays else self._wait * 2 if retried else self._wait


class _Part:
    """A part of one sequence: its session, its latest draft and where that draft's rows went."""

    def __init__(self, drafter: Drafter, context: Context, config: UnionConfig, row_cost: float) -> None:
        self.name = drafter.name
        self.taps = drafter.taps
        self.learns = getattr(drafter, "learns", True)
        self.session: DraftSession = drafter.start(context)
        self.draft = Draft.chain([context.root])
        self.rows: Sequence[int] = [0]
        self.added = range(0)
        """The rows that no part before it had proposed."""
        # Rows are worth less beside those of other parts than where nobody else has anything to say.
        # And the first draft makes a step of one row one of several, with other kernels and a path to verify.
        self._first, self._beside = _Record(config, row_cost, 0.5, 2), _Record(config, row_cost, 0.05, 0)
        self.record: _Record | None = None
        """The one that the latest draft counts for."""
        self.silent = False
        """Whether it had nothing to say when last there was room."""

    def recorded(self, *, beside: bool) -> _Record:
        """Its record behind parts that have drafted something, or that have not."""
        return self._beside if beside else self._first

    def propose(self, room: int) -> Draft:
        """Its draft; with room for the root alone it says nothing."""
        self.draft = draft = self.session.propose(room)
        if draft.entry is not None:
            raise ConfigError(
                f"union cannot take {self.name!r}: its rows enter the target at layer {draft.entry.layer}, other "
                "parts' rows at the embedding; leave it out of union.parts"
            )
        if room > 1:
            self.silent = len(draft) == 1
        # Alone, until other parts' rows come before.
        self.rows, self.added = range(len(draft)), range(1, len(draft))
        return draft

    def place(self, builder: DraftBuilder) -> None:
        """Put its rows among those of other parts; equal ones are there already."""
        draft, first, rows = self.draft, len(builder), [0]
        for row in range(1, len(draft)):
            parent = rows[draft.parents[row]]
            rows.append(builder.add(parent, draft.tokens[row], candidate=row not in draft.probes))
        self.rows, self.added = rows, range(first, len(builder))

    def judge(self, path: Sequence[int]) -> None:
        """Take note of which of its rows were accepted."""
        if self.record is not None:
            self.record.drafted(len(self.added), sum(row in self.added for row in path))


class UnionSession:
    def __init__(self, config: UnionConfig, parts: Sequence[Drafter], context: Context) -> None:
        self._context = context
        cpu = context.target.device.type == "cpu"
        row_cost = config.row_cost if config.row_cost is not None else supposed_row_cost(context.target)
        self._parts = [_Part(part, context, config, row_cost) for part in parts]
        self._rows = config.rows or (8 if cpu else context.max_rows)

    def propose(self, room: int) -> Draft:
        total = min(self._rows, room - 1)
        builder = DraftBuilder(self._context.root)
        spoke: list[_Part] = []
        for number, part in enumerate(self._parts):
            # Nothing is placed before a second part speaks: most steps belong to one, and cost no merging.
            taken = len(builder) - 1 if len(spoke) != 1 else len(spoke[0].draft) - 1
            part.record = self._ask(number, total - taken, beside=bool(spoke))
            if part.record is None and not part.taps:
                continue  # nobody will tell it of the step either
            if len(part.propose(1 + self._share(number, part.record, total - taken))) > 1:
                spoke.append(part)
                for late in spoke if len(spoke) == 2 else spoke[2:][-1:]:
                    late.place(builder)
        if len(spoke) == 1:
            draft = spoke[0].draft
            return replace(draft, q={}) if draft.q else draft
        return builder.build(read=sorted({part.rows[row] for part in spoke for row in part.draft.read}))

    def _ask(self, number: int, left: int, *, beside: bool) -> _Record | None:
        """The record that a part's next draft counts for; None if it is not to be asked."""
        record = self._parts[number].recorded(beside=beside)
        if left and (number == 0 or record.asks):
            return record
        record.passed()
        return None

    def _share(self, number: int, record: _Record | None, left: int) -> int:
        """How many of the rows that are left a part may take.

        Parts behind it keep a share if they will be asked and their rows have been worth as much as its own.
        """
        if record is None:
            return 0
        if number == len(self._parts) - 1:
            return left
        behind = [part.recorded(beside=True) for part in self._parts[number + 1 :] if not part.silent]
        rivals = [other.worth for other in behind if other.asks and other.worth >= record.worth]
        return shares([record.worth, *rivals], left)[0]

    def observe(self, seen: Observation) -> None:
        for part in self._parts:
            if seen.draft is None:
                if part.taps:
                    part.session.observe(replace(seen, taps={layer: seen.taps[layer] for layer in part.taps}))
                continue
            part.judge(seen.path)
            if part.taps or (part.learns and part.record is not None):
                part.session.observe(part_of(seen, part.draft, part.rows, part.taps))


def shares(worth: Sequence[float], total: int) -> list[int]:
    """Split ``total`` rows: an eighth evenly, so that no part is lost for good, the rest by the squares of the worths.

    Squares, because a good part's first rows are worth more than its average row: it should have all that it can use
    before a poor part has many.

    Example: worths .6 and .2 of 16 rows give 1 + 13 and 1 + 1.
    """
    even = total // (8 * len(worth))
    rest, squares = total - even * len(worth), [value * value for value in worth]
    # By running totals, so that rounding loses no row.
    edges, so_far, whole = [0], 0.0, sum(squares)
    for value in squares:
        so_far += value
        edges.append(round(rest * so_far / whole) if whole else 0)
    edges[-1] = rest
    return [even + after - before for before, after in pairwise(edges)]


def part_of(seen: Observation, draft: Draft, rows: Sequence[int], taps: Collection[int]) -> Observation:
    """What became of ``draft``, whose row i was row ``rows[i]`` of the whole, with the taps that its part wants.

    Where the accepted path leaves the part's own rows, the missing ones are appended to its draft, so that path, tokens
    and taps fit together as if the part had proposed them too. A row that was left out, -1, counts as a probe that
    nobody reads, and its taps mean nothing.
    """
    whole = seen.draft
    assert whole is not None
    assert seen.scores is not None
    path = list(seen.path)
    if rows == range(len(whole)):  # it had the step for itself
        return Observation(draft, path, seen.tokens, seen.scores, {layer: seen.taps[layer] for layer in taps})
    if len(rows) == 1:  # it had none of it: all that concerns it is the text
        chain = Draft.chain([whole.tokens[row] for row in path])
        logits = seen.scores.logits[[seen.scores.place(row) for row in path]]
        hidden = {layer: seen.taps[layer][path] for layer in taps}
        return Observation(chain, range(len(path)), seen.tokens, Scores(logits), hidden)
    place = {row: own for own, row in reversed([*enumerate(rows)])}  # the first of equal rows
    tokens, parents, union_rows = list(draft.tokens), list(draft.parents), list(rows)
    above = 0
    for row in path:
        if row not in place:
            place[row] = len(tokens)
            tokens.append(whole.tokens[row])
            parents.append(above)
            union_rows.append(row)
        above = place[row]
    path = [place[row] for row in path]
    unscored = whole.probes.difference(whole.read)
    probes = draft.probes.difference(path) | {own for own, row in enumerate(rows) if row < 0 or row in unscored}
    unread = probes.difference(draft.read)
    scored = [own for own in range(len(tokens)) if own not in unread]
    own_draft = Draft(tokens, parents, probes=probes, read=draft.read)
    places = [seen.scores.place(union_rows[own]) for own in scored]
    scores = Scores(seen.scores.logits[places], None if len(scored) == len(tokens) else scored)
    hidden = {layer: seen.taps[layer][union_rows] for layer in taps}  # [rows of own_draft, D]
    return Observation(own_draft, path, seen.tokens, scores, hidden)
