"""A drafter's own cache: text that it lacks, rows of trees behind it, and those that became text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from drafters.shared.own_cache import OwnCache
from specdec.drafter import Observation
from specdec.runners.rows import Rows
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.step_io import StepInput
from specdec.step.tree import Draft

CPU = torch.device("cpu")


def new_cache() -> OwnCache:
    return OwnCache(KVCache([LayerSpec(1, 1, 1, None, CPU, torch.float64)], capacity=400, rows=64))


def run(step: StepInput, values: Sequence[float]) -> None:
    """What a pass leaves in the cache: of each row a number that says what was read there."""
    stored = torch.tensor(values, dtype=torch.float64)[None, None, :, None]
    Rows(step).store(stored, stored, 0)


def text_of(own: OwnCache) -> list[int]:
    return [int(value) for value in own.cache.keys[0][0, 0, : own.cache.length, 0].tolist()]


def step(tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]) -> Observation:
    """What became of a draft of these rows where these tokens were emitted; rows that are missing are another's."""
    tokens, parents, path = [*tokens], [*parents], [0]
    for token in emitted[:-1]:
        rows = [row for row in range(len(tokens)) if parents[row] == path[-1] and tokens[row] == token]
        if not rows:
            rows = [len(tokens)]
            tokens.append(token)
            parents.append(path[-1])
        path.append(rows[0])
    return Observation(Draft(tokens, parents), path, emitted)


@pytest.mark.parametrize("reads", ["tokens", "hidden", "guessed"])
@pytest.mark.parametrize("seed", range(5))
def test_after_any_steps_the_cache_and_what_it_lacks_are_the_text(reads: str, seed: int) -> None:
    """Random trees, of which some rows are run; accepted, rejected, another's rows, rests, steps without a draft."""
    rng = random.Random(seed)
    own, text = new_cache(), [rng.randrange(3) for _ in range(6)]
    kept = list[int]()
    if reads != "tokens":
        own.defer(torch.tensor(text[:-1], dtype=torch.float64)[:, None])
    for _ in range(40):
        kind = rng.choice(("draft", "draft", "draft", "plain", "rest"))
        tokens, parents = [text[-1]], [-1]
        if kind == "draft":
            own.begin()
            if reads == "tokens":
                while own.cache.length + len(new := own.lacking(text, 4)) < len(text):
                    run(rows := own.text_rows(new), new)
                    own.read_text(rows, root=False)
                values: Sequence[float] = new
            else:
                values = own.catch_up(torch.tensor(text[-1:], dtype=torch.float64)[:, None])[:, 0].tolist()
            run(rows := own.text_rows(range(len(values))), values)
            own.read_text(rows)
            assert text_of(own) == text[:-1]
            level = [0]
            while level and len(tokens) < 12:
                below = [row for row in level for _ in range(rng.randrange(3))]
                first = len(tokens)
                tokens += [3 * row + rng.randrange(2) for row in range(len(below))]
                tokens[first:] = [token % 3 for token in tokens[first:]]
                parents += below
                level = sorted(rng.sample(range(first, len(tokens)), rng.randint(0, len(below))))
                if level:
                    guessed = 100 if reads == "guessed" else 0
                    run(own.draft_rows(level, parents), [tokens[row] + guessed for row in level])
        emitted = [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        if kind == "rest":
            emitted = emitted[:1]
            seen = Observation(None, [0], emitted)
        else:
            seen = step(tokens, parents, emitted)
        known = own.commit(seen, tokens, most=1 if reads == "guessed" else None)
        kept.append(len(known))
        if reads != "tokens":
            path = [text[-1], *emitted[:-1]]
            own.defer(torch.tensor(path[len(known) :], dtype=torch.float64)[:, None])
        text += emitted
        assert text_of(own) == text[: own.cache.length]
        assert len(known) <= len(emitted)
    assert max(kept) > 1 or reads == "guessed"
    assert 0 in kept


def test_a_row_stands_behind_its_parents_place_in_the_round() -> None:
    """Rows 2 and 5 of a draft are run, which are a chain; then row 4, which makes them a tree."""
    own = new_cache()
    own.read_text(own.text_rows([7]))
    parents = [-1, 0, 0, 1, 2, 2]
    rows = own.draft_rows([2], parents)
    assert (rows.tree, rows.rows, rows.chain) == ((0, 2), 1, (True,))
    rows = own.draft_rows([5, 4], parents)
    assert (own.rows, own.parents) == ([0, 2, 5, 4], [-1, 0, 1, 1])
    assert (rows.tree, rows.rows, rows.chain) == ((0, 4), 2, (False,))
    assert (rows.parents.tolist(), rows.depths.tolist()) == ([-1, 0, 1, 1], [0, 1, 2, 2])
    assert own.commit(step([7, 1, 2, 3, 4, 5], parents, [2, 4, 9]), [7, 1, 2, 3, 4, 5]) == [0, 1, 3]
    assert own.cache.length == 3
    assert own.rows == []
