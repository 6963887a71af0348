"""The full matrices, and the part of them that a newcomer waits for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from specdec.drafting.registry import drafter_names

Always = Callable[..., bool]


FEW = ("auto", "draft_model", "kangaroo", "lookahead", "medusa", "suffix_automaton")
"""Drafters of every kind: merged, with a model, with weights, with probes, with text alone."""


def matrix(
    drafters: Sequence[str],
    *axes: Sequence[Any],
    always: Always = lambda *case: False,
    first: Sequence[str] | None = None,
) -> list[Any]:
    """Parameters (drafter, place on each axis), all but each drafter's own turn marked ``slow``.

    Drafter number i of the registry has its turn at place i of every axis, modulo its length, so that the first tier
    has every drafter once and, with enough of them, every place. ``always`` names cases that it has besides.
    ``first``: the drafters that the first tier has; None for all. ``FEW`` do where no drafter's own code is tested.
    """
    turn = {name: number for number, name in enumerate(drafter_names())}
    cases = []
    for drafter, *places in itertools.product(drafters, *map(range, map(len, axes))):
        case = (drafter, *(axis[place] for axis, place in zip(axes, places, strict=True)))
        own = all(place == turn[drafter] % len(axis) for axis, place in zip(axes, places, strict=True))
        own &= first is None or drafter in first
        marks = () if own or always(*case) else (pytest.mark.slow,)
        cases.append(pytest.param(*case, marks=marks))
    return cases


def turns(
    drafters: Sequence[str],
    *axes: Sequence[Any],
    always: Always = lambda *case: False,
    first: Sequence[str] | None = FEW,
) -> list[Any]:
    """The first tier of ``matrix`` alone: for what the exactness harness (``tests.exactness``) draws all of."""
    return [case for case in matrix(drafters, *axes, always=always, first=first) if not case.marks]


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """All combinations, of which the first tier has as many as the longest axis: each value of each axis in some.

    What two values do only together, where neither does it with another one, is left to the second tier.
    """
    values = [tuple(axis) for axis in axes]
    quick = {tuple(turn % len(axis) for axis in values) for turn in range(max(map(len, values)))}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=() if places in quick else (pytest.mark.slow,),
        )
        for places in itertools.product(*map(range, map(len, values)))
    ]


def once(*axes: Iterable[Any]) -> list[Any]:
    """The first tier of ``each_once`` alone: where the harness draws values together, or each acts by itself."""
    return [case for case in each_once(*axes) if not case.marks]
