"""Jacobi decoding: answers become guesses for the positions below them, on a target without weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from drafters.jacobi import guesses_for
from specdec import Draft, Engine
from specdec.costs.curve import CostCurve, roofline
from specdec.drafting.registry import make_drafter
from tests.fakes import Reciter, Spy


def by_position(text: Sequence[int]) -> int:
    """What comes next depends on the position alone, so that an answer after a wrong guess is right."""
    return len(text) // 3 % 10


@pytest.mark.few(1)
@pytest.mark.parametrize("guesses", [1, 4])
def test_right_answers_are_accepted_as_guesses(guesses: int) -> None:
    target = Reciter(by_position)
    out = Engine(target, None, {"name": "jacobi", "guesses": guesses}).generate([50, 51], 60)
    assert out.token_ids == Engine(target).generate([50, 51], 60).token_ids
    assert out.stats.tokens_per_step > (1.2 if guesses == 1 else 2)


def test_a_draft_by_hand() -> None:
    """The answers after rows 1 .. 4 of the first draft are rows 1 .. 4 of the second, which begins one token later."""
    drafts: list[Draft] = []
    target = Reciter(by_position)
    drafter = Spy(make_drafter({"name": "jacobi", "guesses": 4}, target), drafts.append)
    Engine(target, None, drafter).generate([50, 51], 20)
    assert set(drafts[0].tokens[1:]) <= {50, 51}  # at random from the prompt
    text = [50, 51, *(position // 3 % 10 for position in range(2, 22))]
    assert list(drafts[1].tokens) == text[2:7]
    assert list(drafts[1].parents) == [-1, 0, 1, 2, 3]


def test_guesses_follow_from_what_rows_cost() -> None:
    """A second guess brings a hundredth of a token: it is made only where its row costs less."""

    def curve(*seconds: float) -> CostCurve:
        return CostCurve(machine={}, rows=[1, 2, 3, 5], lengths=[1], seconds=[seconds])

    for dear in (curve(1, 1.04, 1.15, 1.45), curve(1, 2, 2.1, 2.2), roofline()):
        assert guesses_for(dear, 256) == 1
    for free in (curve(1, 1, 1, 1), curve(1, 2, 2, 2), roofline(at_once=True)):
        assert guesses_for(free, 256) == 4
    assert guesses_for(curve(1, 1, 1, 2), 256) == 2


@pytest.mark.parametrize(("seconds", "rows"), [((1.0, 2.0), 2), ((1.0, 1.0), 5)])
def test_the_engines_curve_decides(seconds: tuple[float, float], rows: int) -> None:
    drafts: list[Draft] = []
    target, costs = Reciter(by_position), CostCurve(machine={}, rows=[1, 20], lengths=[1], seconds=[seconds])
    Engine(target, None, Spy(make_drafter("jacobi", target), drafts.append), costs=costs).generate([50, 51], 20)
    assert len(drafts[0]) == rows
