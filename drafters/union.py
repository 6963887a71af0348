"""Union: several drafters' trees in one, under one budget of rows.

The paper of lookahead decoding adds prompt lookup's n-grams to its own (Fu et al. 2024, Table 3, row 9); this is that,
for any drafters. Equal paths share rows. Parts propose in turn, each within its share and what those before it left,
so nothing that a part asked for is ever cut; shares follow what the part's rows have lately been worth.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from specdec.draft import Draft, DraftBuilder
from specdec.drafter import Context, Drafter, DrafterBase, DraftSession, Observation
from specdec.errors import ConfigError
from specdec.registry import make_drafter
from specdec.sampling import Scores
from specdec.target import Target

__all__ = ["Union", "UnionConfig", "part_of", "shares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionConfig:
    """Options.

    Attributes:
        parts: drafters, each a name or ``{"name": ..., **options}``. Later ones get the rows that earlier ones leave,
            so put those that often have nothing to say first.
        rows: rows below the root, of all parts together; None fits the device: as many as the engine allows on an
            accelerator, 8 on a CPU.
        memory: weight of the past in a part's worth, from one of its drafts to the next.
    """

    parts: list[Any] = field(default_factory=lambda: ["prompt_lookup", "lookahead"])
    rows: int | None = None
    memory: float = 0.9

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("union.parts is empty; name at least one drafter")
        if self.rows is not None and self.rows < len(self.parts):
            raise ConfigError(f"union.rows is {self.rows}; it must be at least 1 for each of {len(self.parts)} parts")
        if not 0 <= self.memory < 1:
            raise ConfigError(f"union.memory is {self.memory}; it must be in [0, 1)")


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
        return cls(config, [make_drafter(part, target) for part in config.parts])

    def start(self, context: Context) -> UnionSession:
        return UnionSession(self.config, self.parts, context)


class _Part:
    """A part of one sequence: its session, its latest draft and where that draft's rows went."""

    def __init__(self, drafter: Drafter, context: Context) -> None:
        self.name = drafter.name
        self.taps = drafter.taps
        self.session: DraftSession = drafter.start(context)
        self.draft = Draft.chain([context.root])
        self.rows: list[int] = [0]
        self.added = range(0)
        """The rows that no part before it had proposed."""
        self.worth = 0.5
        """Accepted rows per added row, lately."""

    def judge(self, path: Sequence[int], memory: float) -> None:
        """Take note of which of its rows were accepted; a part that added nothing is not judged."""
        if self.added:
            accepted = sum(row in self.added for row in path)
            self.worth = memory * self.worth + (1 - memory) * accepted / len(self.added)


class UnionSession:
    def __init__(self, config: UnionConfig, parts: Sequence[Drafter], context: Context) -> None:
        self._config = config
        self._context = context
        self._parts = [_Part(part, context) for part in parts]
        self._rows = config.rows or (8 if context.target.device.type == "cpu" else context.max_rows)

    def propose(self, room: int) -> Draft:
        builder = DraftBuilder(self._context.root)
        read = set[int]()
        allowed = 1
        split = shares([part.worth for part in self._parts], min(self._rows, room - 1))
        for part, share in zip(self._parts, split, strict=True):
            allowed += share
            part.draft = draft = part.session.propose(allowed - len(builder) + 1)
            if draft.entry is not None:
                raise ConfigError(
                    f"union cannot take {part.name!r}: its rows enter the target at layer {draft.entry.layer}, other "
                    "parts' rows at the embedding; leave it out of union.parts"
                )
            part.rows, first = [0], len(builder)
            for row in range(1, len(draft)):
                parent = part.rows[draft.parents[row]]
                part.rows.append(builder.add(parent, draft.tokens[row], candidate=row not in draft.probes))
            part.added = range(first, len(builder))
            read.update(part.rows[row] for row in draft.read)
        return builder.build(read=sorted(read))

    def observe(self, seen: Observation) -> None:
        for part in self._parts:
            if seen.draft is None:
                if part.taps:
                    part.session.observe(replace(seen, taps={layer: seen.taps[layer] for layer in part.taps}))
                continue
            part.judge(seen.path, self._config.memory)
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
    place = {row: own for own, row in reversed([*enumerate(rows)])}  # the first of equal rows
    tokens, parents, union_rows = list(draft.tokens), list(draft.parents), list(rows)
    path = list[int]()
    for row in seen.path:
        if row not in place:
            place[row] = len(tokens)
            tokens.append(whole.tokens[row])
            parents.append(path[-1])
            union_rows.append(row)
        path.append(place[row])
    unscored = whole.probes.difference(whole.read)
    probes = draft.probes.difference(path) | {own for own, row in enumerate(rows) if row < 0 or row in unscored}
    unread = probes.difference(draft.read)
    scored = [own for own in range(len(tokens)) if own not in unread]
    own_draft = Draft(tokens, parents, probes=probes, read=draft.read)
    places = [seen.scores.place(union_rows[own]) for own in scored]
    scores = Scores(seen.scores.logits[places], None if len(scored) == len(tokens) else scored)
    hidden = {layer: seen.taps[layer][union_rows] for layer in taps}  # [rows of own_draft, D]
    return Observation(own_draft, path, seen.tokens, scores, hidden)
