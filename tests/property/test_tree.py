"""Random step trees: their shape, and that a committed path leaves the cache as if it had been the text all along."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import Draft, DraftBuilder
from specdec.errors import DraftError
from specdec.step.step_io import Entering
from specdec.step.tree import ancestors
from tests import seam
from tests.models import VOCAB, model_of, prompt_of, target_of
from tests.property.trees import parent_lists
from tests.tiers import each_once

ROWS = 9
CAPACITY = 64
# Transformers' norms compute in float32 whatever the dtype, so float64 agrees to float32 rounding.
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """The rows from the root down to ``row``."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@given(parents=parent_lists(30))
def test_ancestor_closure(parents: list[int]) -> None:
    closure = ancestors(parents)
    for row in range(len(parents)):
        assert sorted(closure[row].nonzero()[0].tolist()) == path_to(parents, row)


@given(parents=parent_lists(30), probes=st.sets(st.integers(1, 29)), read=st.sets(st.integers(0, 29)))
def test_draft_knows_its_shape(parents: list[int], probes: set[int], read: set[int]) -> None:
    size = len(parents)
    probes, read = {row for row in probes if row < size}, {row for row in read if row < size}
    draft = Draft([row % 4 for row in range(size)], parents, probes=frozenset(probes), read=sorted(read))
    assert draft.depths == [len(path_to(parents, row)) - 1 for row in range(size)]
    assert draft.is_chain == (parents == list(range(-1, size - 1)))
    for row in range(size):
        below = [r for r in range(size) if parents[r] == row and r not in probes]
        assert draft.children()[row] == below
        for token in range(4):
            found = [r for r in below if draft.tokens[r] == token]
            assert draft.child(row, token) == (found[0] if found else None)
    scored = draft.scored_rows()
    assert (list(range(size)) if scored is None else scored) == [r for r in range(size) if r not in probes or r in read]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "one parent per token"),
        ([1, 2], [-1], "one parent per token and -1 as the root's, got 2 tokens"),
        ([1], [0], "-1 as the root's"),
        ([1, 2, 3], [-1, 0, 2], r"row 2 names row 2 as its parent; parents come first, in \[0, 2\)"),
        ([1, 2, 3], [-1, 2, 0], "row 1 names row 2"),
        ([1, 2], [-1, -1], "row 1 names row -1"),
        ([1, 2, 3], range(-1, 5, 2), "row 1 names row 1"),
    ],
)
def test_draft_that_is_no_tree(tokens: list[int], parents: Sequence[int], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        Draft(tokens, parents)


def test_draft_that_names_missing_rows() -> None:
    for rows in ({"probes": frozenset({2})}, {"read": (2,)}, {"q": {2: torch.ones(3)}}, {"read": (-1,)}):
        with pytest.raises(DraftError, match=r"probes, read or q name a row outside \[0, 2\)"):
            Draft((1, 2), (-1, 0), **rows)
    with pytest.raises(DraftError, match="row 0 is the root and cannot be a probe"):
        Draft((1, 2), (-1, 0), probes=frozenset({0}))


@given(
    paths=st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8),
    probes=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=3),
    row_budget=st.integers(1, 20),
)
def test_builder_stores_equal_prefixes_once(paths: list[list[int]], probes: list[list[int]], row_budget: int) -> None:
    builder = DraftBuilder(7)
    for path in probes:
        parent = 0
        for token in path:
            parent = builder.add(parent, token, candidate=False)
    held = len(builder)
    rows = [builder.add_path(path, row_budget=row_budget) for path in paths]
    draft = builder.build()
    assert len(draft) == len(builder) <= max(row_budget, held)
    texts = [tuple(draft.tokens[r] for r in path_to(draft.parents, row)[1:]) for row in range(len(draft))]
    assert len(set(texts)) == len(texts), "an equal prefix has two rows"
    candidates = set[int]()
    for path, found in zip(paths, rows, strict=True):
        assert [draft.tokens[row] for row in found] == path[: len(found)]
        assert len(found) == len(path) or len(builder) >= row_budget
        candidates.update(found)
    assert draft.probes == set(range(1, len(draft))) - candidates


@torch.inference_mode()
def own_logits(family: str, text: Sequence[int]) -> torch.Tensor:
    """[n, V] by the model's own forward over the text, with no cache at all."""
    ids = torch.tensor([text])
    logits: torch.Tensor = model_of(family)(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(("family", "in_parts"), [*each_once(["llama", "mistral"], [False, True]), ("gemma2", False)])
@given(data=st.data(), length=st.integers(0, 45))
@settings(max_examples=25)
def test_commit_equals_recompute(family: str, in_parts: bool, data: st.DataObject, length: int) -> None:
    """A tree's logits are those of each row's own text, and after a commit the cache is the path's."""
    target = target_of(family)
    tokens = list(prompt_of(CAPACITY)[:length])
    with target.active(), seam.in_parts(in_parts):
        own = seam.text(target, capacity=CAPACITY + ROWS, rows=ROWS).fill(tokens, ROWS)
    for _ in range(2):  # the second tree stands on the first one's leftovers
        parents = data.draw(parent_lists(ROWS))
        draft = Draft([data.draw(st.integers(0, VOCAB - 1)) for _ in parents], parents)
        path = path_to(parents, data.draw(st.integers(0, len(draft) - 1)))
        with target.active(), seam.in_parts(in_parts):
            logits = own.run(draft).logits
            own.commit(path)
        tokens += [draft.tokens[row] for row in path]
        assert own.length == len(tokens)
        assert logits is not None
        torch.testing.assert_close(logits[path], own_logits(family, tokens)[-len(path) :], **NEAR)
    with target.active(), seam.in_parts(in_parts):
        fresh = seam.text(target, capacity=CAPACITY + ROWS, rows=ROWS).fill(tokens, ROWS)
        torch.testing.assert_close(own.next_logits(5), fresh.next_logits(5), **NEAR)


@pytest.mark.few(1)
@given(data=st.data(), length=st.integers(0, 30), parents=parent_lists(ROWS), layer=st.integers(1, 2))
@settings(max_examples=25)
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_that_enter_late_are_rows_that_went_through(
    family: str, in_parts: bool, data: st.DataObject, length: int, parents: list[int], layer: int
) -> None:
    """Early layers in pieces, the rest in one go from ``entry``: the same logits, features and cache."""
    target = target_of(family)
    draft = Draft([data.draw(st.integers(0, VOCAB - 1)) for _ in parents], parents)
    cut = data.draw(st.integers(0, len(draft) - 1))
    with target.active(), seam.in_parts(in_parts):
        texts = [seam.text(target, capacity=CAPACITY, rows=ROWS).fill(prompt_of(30)[:length], ROWS) for _ in range(2)]
        whole = texts[0].run(draft, taps={layer})
        features = []
        for first, last in ((0, cut), (cut, len(draft))):
            if first < last:
                piece = draft.tokens[first:last]
                early = texts[1].run(piece, parents[:last], first=first, exit_layer=layer, rows=())
                features.append(early.out)
        entry = Entering(layer, torch.cat(features))
        late = texts[1].run(draft, entry=entry)
        torch.testing.assert_close(entry.hidden, whole.hidden[layer], **NEAR)
        torch.testing.assert_close(late.logits, whole.logits, **NEAR)
        path = path_to(parents, len(draft) - 1)
        for own in texts:
            own.commit(path)
        torch.testing.assert_close(*(own.next_logits(3) for own in texts), **NEAR)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_only_the_rows_asked_for_get_logits(family: str) -> None:
    target = target_of(family)
    draft = Draft((1, 2, 3, 4), (-1, 0, 0, 2))
    with target.active():
        all_rows, some, none = (
            seam.text(target, capacity=8, rows=4).run(draft, rows=asked).logits for asked in (None, [1, 3], [])
        )
    assert all_rows is not None
    assert some is not None
    assert none is None
    assert all_rows.shape == (4, VOCAB)
    torch.testing.assert_close(some, all_rows[[1, 3]], rtol=0, atol=1e-12)


def test_cache_refuses_what_does_not_fit() -> None:
    cache = target_of("mistral").new_cache(capacity=16, rows=4)
    cache.check(4)
    with pytest.raises(DraftError, match=r"draft has 5 rows but 4 slots are free; .*max_rows \(now 4\)"):
        cache.check(5)
