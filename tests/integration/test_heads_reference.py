"""Heads of each published format against implementations of others: the same guesses, after commits and rollbacks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specdec import Context, Draft, DrafterBase, Engine, Observation
from specdec.costs.curve import roofline
from specdec.drafting.registry import make_drafter
from tests import heads
from tests.fakes import Oracle
from tests.head_references import REFERENCES
from tests.models import VOCAB, greedy, prompt_of, target_of

PROMPT = prompt_of(9)
RECORDED = Path(__file__).parents[1] / "head_guesses.json"
SHAPES: tuple[dict[str, Any], ...] = ({"branch": 1, "tokens": 4}, {"rows": 12, "tokens": 3})  # a chain, and a tree


def proposed(
    found: Iterable[tuple[list[int], Draft]], deepest: int
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Of each draft: the text, a path below its root, and the tokens proposed behind it; some must be so deep."""
    reached = 0
    for tokens, draft in found:
        below: dict[int, list[int]] = {}
        for row in range(1, len(draft)):
            below.setdefault(draft.parents[row], []).append(draft.tokens[row])
        for row, children in below.items():
            reached = max(reached, draft.depths[row] + 1)
            yield tokens, draft.path_tokens(row), children
    assert reached >= deepest


class Beside(DrafterBase):
    """Keeps what a drafter proposes, while another one's rows are verified: of every length, in scattered places."""

    name = "beside"
    draws = False
    Config = type(None)

    def __init__(self, inner: Any, verified: Any) -> None:
        super().__init__(None)
        self.inner, self.verified, self.taps = inner, verified, inner.taps
        self.found: list[tuple[list[int], Draft]] = []

    def start(self, context: Context) -> BesideSession:
        return BesideSession(self, context)


class BesideSession:
    def __init__(self, drafter: Beside, context: Context) -> None:
        self._drafter, self._context = drafter, context
        self._sessions = [drafter.inner.start(context), drafter.verified.start(context)]

    def propose(self, row_budget: int) -> Draft:
        draft = self._sessions[0].propose(row_budget)
        self._drafter.found.append(([*self._context.tokens], draft))
        return self._sessions[1].propose(row_budget)

    def observe(self, seen: Observation) -> None:
        for session in self._sessions:
            session.observe(seen)


def guesses(
    case: str, folder: Path, shape: dict[str, Any], new: int
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """In each step of a text whose blocks are accepted as they come: the text, a path below its root, and the tokens
    that the head proposes behind it.
    """
    own = REFERENCES[case]
    target, truth = target_of(own.family), greedy(own.family, PROMPT, 40)[:new]
    heads.write(folder, own.config, own.tensors)
    settings = {"name": own.drafter, "head": str(folder), "min_chance": 0.0, **shape}
    drafter = Beside(make_drafter(settings, target), Oracle([*PROMPT, *truth], VOCAB))
    out = Engine(target, None, drafter, max_rows=24, prefill_chunk=4, costs=roofline()).generate(PROMPT, new)
    assert out.token_ids == truth
    assert len(set(out.stats.acceptance_lengths)) > 2  # blocks of several lengths were committed
    yield from proposed(drafter.found, deepest=3)


@cache
def recorded() -> dict[str, dict[str, list[int]]]:
    return json.loads(RECORDED.read_text())


def key(tokens: list[int], path: list[int]) -> str:
    return " ".join(map(str, (len(tokens), *path)))


@pytest.mark.few(2)
@pytest.mark.parametrize("case", REFERENCES)
def test_guesses_are_those_that_were_recorded(case: str, tmp_path: Path) -> None:
    """What others' code guesses, as ``scripts/record_heads.py`` wrote it down."""
    for shape in SHAPES:
        for tokens, path, children in guesses(case, tmp_path, shape, 16):
            assert children == recorded()[case][key(tokens, path)][: len(children)], (len(tokens), path)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFERENCES)
def test_guesses_are_others(case: str, tmp_path: Path) -> None:
    """As they compute them here and now, over a longer text."""
    try:
        guess = REFERENCES[case].guess()
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed; see tests/head_references.py")
    for shape in SHAPES:
        for tokens, path, children in guesses(case, tmp_path, shape, 40):
            likeliest = guess(tokens, path)[-1].topk(len(children)).indices.tolist()
            assert children == likeliest, (len(tokens), path)
