"""Prefix tree: what several texts begin with is run once, and within a bound of bytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine, PrefixCache, PrefixTree, SamplingParams
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.errors import ConfigError
from specdec.models.transformers_target import TransformersTarget
from tests.fakes import Oracle, Reciter, Spy
from tests.models import FAMILIES, VOCAB, greedy, new_model, prompt_of, settings_of, target_of

LARGE = 1 << 30
SYSTEM = [7, 3, 9, 4, 8, 2, 6, 5, 1, 7, 7, 2]


def whole_text(text: Sequence[int]) -> int:
    """A rule that a token read from a wrong slot changes."""
    return sum((place + 1) * token for place, token in enumerate(text)) % 100


def reciting() -> Engine:
    return Engine(Reciter(whole_text), None, prefill_chunk=100)


def reused(engine: Engine, tree: PrefixTree, text: Sequence[int], new: int = 3) -> int:
    """How many tokens of a text were there, which is decoded as without a tree."""
    found = engine.generate(list(text), new, prefix_cache=tree)
    assert found.token_ids == engine.generate(list(text), new).token_ids
    return found.stats.reused_tokens


def test_several_texts_share_what_they_begin_with() -> None:
    """And go on from where each of them ended, in any order."""
    engine, tree = reciting(), PrefixTree(LARGE)
    first = [*SYSTEM, 30, 31]
    assert reused(engine, tree, first) == 0
    assert reused(engine, tree, [*SYSTEM, 40, 41]) == len(SYSTEM)
    assert reused(engine, tree, [*SYSTEM[:5], 50]) == 5  # a branch within a node
    assert reused(engine, tree, [60, 61]) == 0
    answer = engine.generate(first, 3).token_ids
    assert reused(engine, tree, [*first, *answer, 9]) == len(first) + 2  # the last token was never run
    assert reused(engine, tree, [*first, *answer, 9, 9]) == len(first) + 4
    assert reused(engine, tree, SYSTEM[:3]) == 2  # the last one is the root, and is run


def test_what_is_shared_is_held_once() -> None:
    engine, tree, sizes = reciting(), PrefixTree(LARGE), list[int]()
    for number in range(4):
        engine.generate([*SYSTEM * 5, 20 + number], 1, prefix_cache=tree)
        sizes.append(tree.nbytes)
    each = sizes[0] // (len(SYSTEM) * 5 + 1)
    assert sizes == [each * (len(SYSTEM) * 5 + count) for count in range(1, 5)]


def test_what_was_not_used_for_longest_goes_first() -> None:
    engine = reciting()
    tree = PrefixTree(LARGE)
    engine.generate([*range(10, 20)], 1, prefix_cache=tree)
    tree = PrefixTree(3 * tree.nbytes)
    texts = [[start, *range(30, 39)] for start in range(3)]
    for text in texts:
        assert reused(engine, tree, text, 1) == 0
    assert tree.nbytes == tree.max_bytes
    assert reused(engine, tree, texts[0], 1) == 9  # used again
    assert reused(engine, tree, [50, *range(60, 69)], 1) == 0  # takes the place of texts[1]
    assert tree.nbytes == tree.max_bytes
    assert [reused(engine, tree, text, 1) for text in (texts[0], texts[2])] == [9, 9]
    assert reused(engine, tree, texts[1], 1) == 0


def test_leaves_go_before_what_they_share() -> None:
    engine, tree = reciting(), PrefixTree(LARGE)
    engine.generate([*SYSTEM, 1], 1, prefix_cache=tree)
    each = tree.nbytes // (len(SYSTEM) + 1)
    tree = PrefixTree((len(SYSTEM) + 8) * each)
    for number in range(6):
        assert reused(engine, tree, [*SYSTEM, 20 + number, *range(30, 35)], 1) == (len(SYSTEM) if number else 0)
        assert tree.nbytes <= tree.max_bytes


def test_a_text_that_does_not_fit_is_not_kept_and_drives_out_none_of_its_own() -> None:
    engine, tree = reciting(), PrefixTree(LARGE)
    engine.generate([*SYSTEM, 1], 1, prefix_cache=tree)
    tree = PrefixTree(tree.nbytes)
    for count in (50, 50, len(SYSTEM)):  # too many alone, or with what they share
        engine.generate([*SYSTEM, 1], 1, prefix_cache=tree)
        assert tree.nbytes == tree.max_bytes
        assert reused(engine, tree, [*SYSTEM, *range(40, 40 + count)], 1) == len(SYSTEM)
        assert tree.nbytes == tree.max_bytes


def test_memory_of_what_went_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tree = reciting(), PrefixTree(LARGE)
    engine.generate([*SYSTEM, 1], 2, prefix_cache=tree)
    engine.generate([*SYSTEM[:4], 1], 2, prefix_cache=tree)  # splits the node
    held = [weakref.ref(piece.keys) for node in tree._nodes() for piece in node.pieces]
    tree.max_bytes = tree.nbytes
    engine.generate([*range(50, 50 + len(SYSTEM) + 2)], 2, prefix_cache=tree)
    gc.collect()
    gone = [one() is None for one in held]
    assert any(gone)
    tree.clear()
    gc.collect()
    assert all(one() is None for one in held)
    assert tree.nbytes == 0


def test_a_text_that_still_runs_is_gone_on_from_as_far_as_it_came() -> None:
    engine, tree = reciting(), PrefixTree(LARGE)
    running = engine.start([*SYSTEM, 1], 9, prefix_cache=tree)
    running.prefill()
    running.step()
    assert tree.nbytes == 0  # it has a cache of its own
    assert reused(engine, tree, [*SYSTEM, 2]) == len(SYSTEM)
    while running.finish_reason is None:
        running.step()
    assert running.result().token_ids == engine.generate([*SYSTEM, 1], 9).token_ids


def test_a_text_that_was_left_in_the_middle_is_kept_as_far_as_it_came() -> None:
    engine, tree = reciting(), PrefixTree(LARGE)
    left = engine.start([*SYSTEM, 1], 9, prefix_cache=tree)
    left.prefill()
    left.step()
    text = [*left.tokens, 4]
    cache = weakref.ref(left.sequence.context.cache)
    del left
    gc.collect()
    assert tree.nbytes > 0
    assert cache() is None  # what is kept is a copy
    assert reused(engine, tree, text) == len(SYSTEM) + 1


@pytest.mark.slow
def test_requests_that_run_together_share_one_tree(tiny_engine: Engine) -> None:
    """Cancelled ones too; the second round runs no more than the ends."""
    tree, system = PrefixTree(LARGE), "You are a careful assistant. " * 4
    prompts = [f"{system}Question {number}: " for number in range(6)]
    plain = [tiny_engine.generate(prompt, 8).token_ids for prompt in prompts]
    for turn in range(2):
        scheduler = Scheduler(tiny_engine, batch=3)
        handles = [scheduler.submit(Request(prompt, 8, prefix_cache=tree)) for prompt in prompts]
        scheduler.cancel(handles[4])
        done = {}
        while not scheduler.idle:
            done |= {event.index: event.generation() for event in scheduler.step() if event.last}
        for place, handle in enumerate(handles):
            if place != 4:
                assert done[handle.index].token_ids == plain[place]
                stats = done[handle.index].stats
                if turn or place > 2:
                    assert stats.reused_tokens >= len(tiny_engine.encode(system)) - 2


def test_requests_that_come_together_have_what_the_first_one_ran() -> None:
    """No text is known when they are admitted, and the first one fills the first forwards."""
    engine = Engine(Reciter(whole_text), None, max_rows=1)
    system = [token % 90 for token in range(200)]
    prompts = [[*system, 90 + number, 3] for number in range(6)]
    plain = [engine.generate(prompt, 5).token_ids for prompt in prompts]
    for tree in (PrefixTree(LARGE), PrefixCache()):
        rows, done = engine.target.forwards, {}
        rows.clear()
        for events in Scheduler(
            engine, [Request(prompt, 5, prefix_cache=tree) for prompt in prompts], step_rows=50
        ).run():
            done |= {event.index: event.generation() for event in events if event.last}
        assert [done[place].token_ids for place in range(6)] == plain
        if isinstance(tree, PrefixTree):
            assert sum(rows) < 200 + 6 * 60
            assert all(done[place].stats.reused_tokens >= 150 for place in range(1, 6))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [*FAMILIES, "lfm2"])
def test_windows_go_on_from_the_longest_beginning_whose_keys_are_there(family: str) -> None:
    target, prompt, tree = target_of(family), prompt_of(30), PrefixTree(LARGE)
    engine = Engine(target, None, max_rows=1, prefill_chunk=16)
    windows = any(spec.window is not None for spec in target.specs)
    counts = list[int]()
    for text in (prompt, (*prompt, 5, 6), (*prompt[:27], 7), (*prompt[:6], 7), (*prompt, 5, 6, 7)):
        found = engine.generate(text, 9, prefix_cache=tree)
        assert found.token_ids == greedy(family, text, 9)
        counts.append(found.stats.reused_tokens)
    assert counts[0] == 0
    if not windows:
        assert counts == [0, 30, 27, 6, 32]
    else:
        assert counts[1] == 30
        assert counts[3] == 0
        assert counts[4] in (30, 32)


def test_hidden_states_are_kept_where_a_drafter_wants_them(tmp_path: Path) -> None:
    """Who cannot do without them runs what lacks them; theirs are added to what a text without them left."""
    target, prompt, tree = target_of("llama"), prompt_of(40), PrefixTree(LARGE)
    plain, reader = Engine(target, None), Spy(Oracle(prompt, VOCAB))
    reader.taps = frozenset({1})
    needy = Engine(target, None, reader, max_rows=24)
    medusa = Engine(target, None, settings_of("medusa", target, tmp_path)[0], max_rows=24)
    counts = list[int]()
    for engine in (plain, medusa, needy, needy, plain, needy, medusa):
        found = engine.generate(prompt, 8, prefix_cache=tree)
        assert found.token_ids == greedy("llama", prompt, 8)
        counts.append(found.stats.reused_tokens)
    assert counts == [0, 39, 0, 39, 39, 39, 39]


def test_hidden_states_behind_unknown_ones_are_not_given() -> None:
    """As where there was no room for those of a node, and for those of one below it."""
    target, prompt, tree = target_of("llama"), prompt_of(40), PrefixTree(LARGE)
    reader = Spy(Oracle(prompt, VOCAB))
    reader.taps = frozenset({1})
    engine = Engine(target, None, reader, max_rows=24)
    for text in (prompt, [*prompt[:20], 3]):  # the second one splits the first one's node
        engine.generate(text, 2, prefix_cache=tree)

    def begun() -> tuple[int, list[int]]:
        cache = target.new_cache(capacity=60, rows=24)
        _, hidden = tree.begin(target, cache, [*prompt, 5], {1}, forgoes=True)
        return cache.length, [len(rows) for rows in hidden.values()]

    assert begun() == (40, [40])
    tree._running.clear()
    next(node for node in tree._nodes() if not node.start).taps.clear()
    assert begun() == (40, [])


def test_a_model_that_was_changed_begins_anew() -> None:
    model, prompt, tree = new_model("llama"), prompt_of(20), PrefixTree(LARGE)
    engine = Engine(TransformersTarget(model), None)
    engine.generate(prompt, 4, prefix_cache=tree)
    size = tree.nbytes
    assert reused(engine, tree, prompt) == 19
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(2)
    assert reused(engine, tree, prompt, 4) == 0
    assert tree.nbytes == size  # what was known of the model as it was is forgotten
    assert reused(engine, tree, prompt) == 19


def test_a_text_whose_model_changed_while_it_ran_is_not_kept() -> None:
    model, prompt, tree = new_model("llama"), prompt_of(20), PrefixTree(LARGE)
    engine = Engine(TransformersTarget(model), None)
    running = engine.start(prompt, 4, prefix_cache=tree)
    with engine.target.active():
        running.prefill()
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(2)
    del running
    gc.collect()
    assert tree.nbytes == 0
    assert reused(engine, tree, prompt) == 0


def test_several_models_share_one_tree() -> None:
    tree = PrefixTree(LARGE)
    engines = [reciting(), reciting()]
    for turn in range(2):
        for engine in engines:
            assert reused(engine, tree, SYSTEM) == (len(SYSTEM) - 1 if turn else 0)


def test_samples_are_those_of_the_seed() -> None:
    engine, tree = Engine(target_of("qwen3"), None, "prompt_lookup"), PrefixTree(LARGE)
    sampling = SamplingParams(temperature=0.9, seed=4)
    for _ in range(2):
        found = engine.generate(prompt_of(20), 20, sampling, prefix_cache=tree)
        assert found.token_ids == engine.generate(prompt_of(20), 20, sampling).token_ids


@pytest.mark.parametrize("size", [0, -5])
def test_a_bound_is_positive(size: Any) -> None:
    with pytest.raises(ConfigError, match=f"max_bytes is {size}; it must be at least 1"):
        PrefixTree(size)
