"""Trees that heads draw under ``reject``: by enumeration of all draws and coins, and the parts that make them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.heads import growing
from drafters.heads.drawing import drawn, planned
from drafters.heads.growing import Behind, GrowingSession
from drafters.shared.ranks import Ranks
from drafters.shared.vocabulary import DraftVocabulary
from specdec import Draft, SamplingParams
from specdec.costs.curve import roofline
from specdec.drafter import Context
from specdec.sampling.verify import reject
from specdec.step.forward_passes import Passes
from tests.choices import Choices
from tests.unit.sampling.test_verify import Table, distance, emitted, joint, table


class Tabled(GrowingSession):
    """A session whose head gives the distributions of a table, and trusts them more behind some tokens than others."""

    def __init__(self, context: Context, options: Any, q: Table, *, at_once: bool) -> None:
        super().__init__(context, VOCABULARY, options, depth=3, weights=1.0, at_once=at_once)
        self._table = q

    def _ready(self) -> bool:
        return True

    def _begin(self, deepest: int) -> Passes[None]:
        yield from ()

    def _behind(self, grown: Any, level: Sequence[int], tokens: Sequence[int]) -> Passes[Behind]:
        yield from ()
        paths = [tuple(grown.path(node)) for node in level]
        rows = torch.stack([self._table[path] for path in paths])
        return Behind(rows.log(), [0.95 if sum(path) % 2 else 0.1 for path in paths])


TARGET: Any = SimpleNamespace(vocab_size=3, hidden_size=1, layer_weights=100, head=None, num_layers=1)
VOCABULARY = DraftVocabulary(None, TARGET)


def drafted(choices: Choices, q: Table, options: dict[str, Any]) -> Draft:
    """The draft of a session whose draws are choices."""

    def pick(shares: torch.Tensor, uniforms: Sequence[Sequence[int]]) -> list[list[int]]:
        turns = [turn for own in uniforms for turn in own]
        assert used.isdisjoint(turns), "one random number decides twice"
        assert len({*turns}) == len(turns)
        used.update(turns)
        found = []
        for left, own in zip(shares.clone(), uniforms, strict=True):
            places = list[int]()
            while len(places) < len(own) and float(left.sum()) > 0:
                places.append(choices.pick((left / left.sum()).tolist()))
                left[places[-1]] = 0
            found.append(places)
        return found

    used = set[int]()
    noise: Any = SimpleNamespace(uniform=lambda position, stream, turn: turn)
    context = Context(
        target=TARGET, cache=SimpleNamespace(length=2), tokens=[0, 0, 0], prompt_length=3, remaining=9, max_rows=16,  # type: ignore[arg-type]
        sampling=SamplingParams(temperature=1.0, acceptance="reject"), noise=noise, rng=random.Random(0),
        costs=roofline(),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "drawn", pick)
        settings = SimpleNamespace(**{"rows": 3, "branch": 2, "min_chance": None, "tokens": 3, **options})
        return Tabled(context, settings, q, at_once=True).propose(16)


TABLES = {"smooth": (table(3, 1), table(3, 2)), "q without some": (table(3, 7), table(3, 8, zeros=True))}


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{}, {"min_chance": 0.05}, {"branch": 1}, {"branch": 3, "rows": 4}], ids=str)
@pytest.mark.parametrize("tables", TABLES)
def test_drawn_trees_keep_the_joint_distribution(tables: str, options: dict[str, Any]) -> None:
    """Their shapes follow from what was drawn above and beside, and no shape biases the text."""
    p, q = TABLES[tables]
    shapes = set[tuple[int, ...]]()

    def draw(choices: Choices, q: Table) -> Draft:
        draft = drafted(choices, q, options)
        shapes.add(tuple(draft.parents))
        return draft

    assert distance(emitted(reject, p, q, draw), joint(p)) < 1e-12
    if options.get("branch") != 1:
        assert len(shapes) > 1
        assert any(len({*parents}) < len(parents) for parents in shapes)  # siblings


def test_a_tree_that_leaves_out_what_was_drawn_is_seen() -> None:
    """The enumeration finds the fault that the rule is about: rows are chosen by the tokens that were drawn."""
    p, q = TABLES["smooth"]

    def pruned(choices: Choices, q: Table) -> Draft:
        draft = drafted(choices, q, {})
        kept = [row for row in range(len(draft)) if row == 0 or draft.parents[row] or draft.tokens[row] != 2]
        kept = [row for row in kept if row == 0 or draft.parents[row] in kept]
        parents = [-1, *(kept.index(draft.parents[row]) for row in kept[1:])]
        return Draft(
            [draft.tokens[row] for row in kept], parents, q={kept.index(r): q for r, q in draft.q.items() if r in kept}
        )

    assert distance(emitted(reject, p, q, pruned), joint(p)) > 1e-3


def test_draws_are_those_of_q_without_replacement() -> None:
    """A grid of numbers for two draws: shares of pairs as by hand; a token without probability is never drawn."""
    q = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    grid = [(place + 0.5) / 40 for place in range(40)]
    found = Counter[tuple[int, ...]]()
    for first in grid:
        for second in grid:
            one, other = drawn(q, [[first, second], [second, first]])
            assert other == [1]  # nothing is left for a second
            found[tuple(one)] += 1
    assert sum(found.values()) == 1600
    for pair, share in {(0, 2): 0.5 * 0.6, (0, 3): 0.5 * 0.4, (2, 0): 0.3 * 5 / 7, (3, 2): 0.2 * 3 / 8}.items():
        assert found[pair] / 1600 == pytest.approx(share, abs=0.02)
    assert drawn(q, [[], []]) == [[], []]
    assert drawn(q * torch.nan, [[0.5], [0.5]]) == [[], []]


def by_hand(
    reach: Iterable[float], chances: Sequence[Sequence[float]], usual: Sequence[float], levels: int, most: int
) -> list[int]:
    """All paths by rank, the likeliest ``most`` of them, and how many of these are of the first level."""
    paths: list[tuple[tuple[int, ...], float]] = [
        ((place, rank), own * chance) for place, own in enumerate(reach) for rank, chance in enumerate(chances[place])
    ]
    level = paths
    for _ in range(levels - 1):
        level = [((*path, rank), own * chance) for path, own in level for rank, chance in enumerate(usual)]
        paths = paths + level
    best = sorted(paths, key=lambda one: -one[1])[:most]
    return [sum(len(path) == 2 and path[0] == place for path, _ in best) for place in range(len(chances))]


@pytest.mark.parametrize("most", [1, 3, 6, 12])
@pytest.mark.parametrize("levels", [1, 3])
def test_siblings_are_drawn_where_nothing_further_down_is_likelier(levels: int, most: int) -> None:
    reach, chances, usual = [0.9, 0.31], [[0.7, 0.13, 0.02], [0.83, 0.11]], [0.61, 0.17, 0.05]
    found = planned(reach, chances, usual, levels=levels, rows=4, pays=lambda chance, rows: rows < 4 + most)
    assert found == by_hand(reach, chances, usual, levels, most)
    assert planned(reach, [[], [0.5]], usual, levels=levels, rows=0, pays=lambda chance, rows: chance > 0.2) == [0, 0]


def test_ranks_are_learned() -> None:
    ranks = Ranks(3, 0.6, 4.0)
    assert ranks.shares == pytest.approx([0.6, 0.24, 0.096])
    ranks.learn([7, 8], 8)
    assert ranks.shares == pytest.approx([2.4 / 5, 1.96 / 5, 0.096])
    sure, unsure = ranks.behind(0.99), ranks.behind(0.1)
    assert sure[0] > ranks.shares[0] > unsure[0]
    assert sure[1] < unsure[1]
    for _ in range(30):
        ranks.learn([7, 8], 8)
    assert ranks.behind(0.5) == sorted(ranks.behind(0.5), reverse=True)
