"""Jacobi decoding: answers become guesses for the positions below them, on a target without weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec import Draft, Engine
from specdec.registry import make_drafter
from tests.fakes import Reciter, Spy


def by_position(text: Sequence[int]) -> int:
    """What comes next depends on the position alone, so that an answer after a wrong guess is right."""
    return len(text) // 3 % 10


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
