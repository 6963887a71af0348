"""Joining what several sequences bring to a forward, and taking the first of them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from specdec.step.step_io import Draws, Entering, Ints, StepInput, Walk, Wanted, fixed

__all__ = ["beginning", "joined"]

_NO_WALK = Walk()


def joined(steps: Sequence[StepInput]) -> StepInput:
    """The rows of several sequences as one forward, one sequence's after the other's; all have one plan.

    Sequences come in the order of the layers that they enter.
    """
    if len(steps) == 1:
        return steps[0]
    counts, sizes = tuple([step.rows for step in steps]), tuple([step.tree[-1] for step in steps])
    starts, tree, parents, depths = _chains(counts, sizes)
    chain, tokens = [step.chain[0] for step in steps], [step.tokens for step in steps]
    if False in chain:
        parents = np.concatenate([step.parents for step in steps])
        depths = np.concatenate([step.depths for step in steps])
    given: list[Any] = [step.entering for step in steps if step.entering is not None]
    layers = [-1 if step.entering is None else step.entering.layer[0] for step in steps] if given else []  # type: ignore[index]
    on_host = {type(own) for own in tokens} == {np.ndarray}
    numbers: Any = np.concatenate(tokens) if on_host else tokens
    return StepInput(
        [step.texts[0] for step in steps],
        starts,
        numbers,
        [step.lengths[0] for step in steps],
        tree,
        parents,
        depths,
        starts[-1],
        max([step.end for step in steps]),
        chain,
        steps[0].plan,
        _wanted([step.wanted for step in steps], starts),
        Entering(layers, [one.hidden[0] for one in given]) if given else None,
        [step.again[0] for step in steps],
    )


def beginning(step: StepInput, count: int, wanted: Wanted) -> StepInput:
    """The first ``count`` sequences of a forward, of which something else may be wanted."""
    if count == len(step.texts):
        return replace(step, wanted=wanted)
    tokens: Any = step.tokens
    return replace(
        step,
        texts=step.texts[:count],
        starts=step.starts[: count + 1],
        tokens=tokens[:count] if type(tokens) is list else tokens[: step.starts[count]],
        lengths=step.lengths[:count],
        tree=step.tree[: count + 1],
        parents=step.parents[: step.tree[count]],
        depths=step.depths[: step.tree[count]],
        rows=step.starts[count],
        chain=step.chain[:count],
        again=step.again[:count],
        wanted=wanted,
    )


def _wanted(each: Sequence[Wanted], starts: Sequence[int]) -> Wanted:
    """What is wanted of the rows of several sequences."""
    top_k, hidden, some = 0, frozenset[int](), False
    for one in each:
        top_k, hidden = one.top_k if one.top_k > top_k else top_k, hidden.union(one.hidden) if one.hidden else hidden
        some = some or one.logits is not None or one.draws is not None or bool(one.walks)
    if not some:
        return Wanted(None, top_k, hidden)
    logits = draws = None
    if [one for one in each if one.logits is not None]:
        pairs = zip(each, starts, starts[1:], strict=False)
        parts = [np.arange(*own) if one.logits is None else own[0] + one.logits for one, *own in pairs]
        logits = np.concatenate(parts)
    if [one for one in each if one.draws is not None]:
        own = [(0, 0.0) if one.draws is None else (one.draws.start[0], one.draws.temperature[0]) for one in each]
        draws = Draws([start for start, _ in own], [temperature for _, temperature in own])
    walks = [one.walks[0] if one.walks else _NO_WALK for one in each] if [one for one in each if one.walks] else ()
    return Wanted(logits, top_k, hidden, draws, walks)


@lru_cache(maxsize=256)
def _chains(counts: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Sequence[int], Sequence[int], Ints, Ints]:
    """The same of the last ``counts`` rows of chains of ``sizes`` rows."""
    depths = np.concatenate([np.arange(size) for size in sizes])
    return (0, *accumulate(counts)), (0, *accumulate(sizes)), fixed(depths - 1), fixed(depths)
