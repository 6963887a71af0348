"""Texts under speculation are plain decoding's: cases drawn by seed, see ``tests.exactness``.

A case again, or others: ``EXACTNESS=17 python -m pytest tests/property/test_exactness.py -n 0`` (or ``150:400``).
"""

from __future__ import annotations

import os
from dataclasses import fields

import pytest

from tests.exactness import cases
from tests.exactness.cases import Case, described, draw
from tests.exactness.targets import Targets
from tests.exactness.texts import check

COUNT, QUICK = 150, len(cases.DRAFTERS)  # in which each drafter is drawn once


def seeds() -> list[object]:
    """Those that are asked for by name, or ``COUNT``, all but ``QUICK`` of them slow."""
    if asked := os.environ.get("EXACTNESS"):
        first, _, last = asked.partition(":")
        return [*range(int(first), int(last or int(first) + 1))]
    return [pytest.param(seed, marks=() if seed < QUICK else pytest.mark.slow) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("exactness"))


@pytest.mark.parametrize("seed", seeds())
def test_the_text_is_plain_decoding_s(seed: int, targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(seed)
    print(described(case))
    tokens, steps = check(case, targets, monkeypatch)
    if case.drafter == "oracle" and case.max_rows > 4 and case.policy == "off" and not case.rejects and tokens > 9:
        assert steps < tokens, "no draft of one that knows the text was accepted"


def values_of(drawn: list[Case]) -> dict[str, set[object]]:
    return {field.name: {getattr(case, field.name) for case in drawn} for field in fields(Case)}


def test_all_values_are_drawn() -> None:
    """Each drafter, family, format and so on by several of the cases; the quick ones have each drafter and load."""
    values = values_of([draw(seed) for seed in range(COUNT)])
    assert values["drafter"] == {*cases.DRAFTERS}
    assert values["executor"] == {executor for executor, _, _ in cases.KINDS}
    assert values["family"] == {family for _, _, families in cases.KINDS for family in families}
    assert values["sampling"] == {*cases.SAMPLINGS}
    assert values["load"] == {*cases.LOADS}
    assert values["end"] == {*cases.ENDS}
    assert len(values["format"]) == 9 + 14
    quick = values_of([draw(seed) for seed in range(QUICK)])
    assert quick["drafter"] == {*cases.DRAFTERS}
    assert quick["executor"] == values["executor"]
    assert quick["load"] == {*cases.LOADS}
