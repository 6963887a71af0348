"""Prefix cache: a text that begins as the last one did is decoded as if there had been no last one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec import Engine, Generation, PrefixCache, SamplingParams
from specdec.drafting.registry import drafter_names
from specdec.engine.prefix_cache import KeptText
from specdec.engine.prefix_tree import PrefixTree
from specdec.engine.scheduler import Scheduler
from specdec.errors import ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.native.library import library
from specdec.step.slots import ContiguousSlots
from tests.fakes import Oracle, Reciter, Spy
from tests.models import FAMILIES, VOCAB, greedy, new_model, prompt_of, settings_of, target_for, target_of
from tests.tiers import FEW, matrix

SIZES = {"max_rows": 24, "prefill_chunk": 16}


def whole_text(text: Sequence[int]) -> int:
    """A rule that a token read from a wrong slot changes."""
    return sum((place + 1) * token for place, token in enumerate(text)) % 100


def talk(engine: Engine, texts: Sequence[Sequence[int]], new: int = 20) -> list[Generation]:
    """Each text after the one before, with one cache."""
    kept = PrefixCache()
    return [engine.generate(text, new, prefix_cache=kept) for text in texts]


def test_only_what_is_new_is_run() -> None:
    target, kept = Reciter(whole_text), PrefixCache()
    engine = Engine(target, None, prefill_chunk=100)
    first = engine.generate([3, 1, 4, 1, 5], 6, prefix_cache=kept)
    text = [3, 1, 4, 1, 5, *first.token_ids, 9, 2, 6]
    target.forwards.clear()
    second = engine.generate(text, 4, prefix_cache=kept)
    # Of eleven tokens the last was never cached, and the new text's last is its root: three are run.
    assert target.forwards == [3, 1, 1, 1, 1]
    assert (second.stats.prompt_tokens, second.stats.reused_tokens) == (14, 10)
    assert second.token_ids == engine.generate(text, 4).token_ids
    assert second.stats.seconds.prefill > 0


@pytest.mark.few(3)
@pytest.mark.parametrize("shared", [0, 1, 5, 16, 17, 19, 20])
@pytest.mark.parametrize("length", [1, 18, 40])
def test_any_common_beginning(shared: int, length: int) -> None:
    """A shorter text, a longer one, the same one; branching off anywhere."""
    prompt = [token % 100 for token in range(7, 27)]
    other = ([*prompt[:shared], *range(50, 90)])[:length]
    engine = Engine(Reciter(whole_text), None, **SIZES)
    _, again = talk(engine, [prompt, other])
    assert again.token_ids == engine.generate(other, 20).token_ids
    assert again.stats.reused_tokens == min(shared, length - 1)


TEXTS: Sequence[Callable[[Sequence[int], Sequence[int]], Sequence[int]]] = (
    lambda prompt, answer: [*prompt, *answer, 5, 6, 7],  # the next turn
    lambda prompt, answer: [*prompt, *answer[:-3], 9],  # another end
    lambda prompt, answer: [*prompt, *answer[:4]],  # back to where a ring has moved on
    lambda prompt, answer: prompt,
)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [*FAMILIES, "lfm2"])
def test_windows_and_all(family: str) -> None:
    """Trees with rejected rows write ahead of what they commit: a ring tells whether what is seen is still there."""
    target, prompt, new = target_of(family), prompt_of(30), 30
    answer = greedy(family, prompt, new)
    oracle = Oracle([*prompt, *answer], VOCAB)
    windows = [spec.window for spec in target.specs if spec.window is not None]
    for place, text in enumerate(tuple(make(prompt, answer)) for make in TEXTS):
        kept = PrefixCache()
        Engine(target, None, oracle, **SIZES).generate(prompt, new, prefix_cache=kept)
        again = Engine(target, None, Oracle([*text, *greedy(family, text, 9)], VOCAB), **SIZES).generate(
            text, 9, prefix_cache=kept
        )
        assert again.token_ids == greedy(family, text, 9)
        reused = again.stats.reused_tokens
        assert bool(reused) == (not windows or place < 2), place
        assert reused in (0, *range(len(text) - 5, len(text)))


def test_a_ring_knows_of_the_rows_that_were_rejected() -> None:
    """Window 8 and 24 rows make 31 slots: positions up to 53 were written, so those below 23 are gone."""
    cache = target_of("mistral").new_cache(capacity=100, rows=24)
    cache.length = 30
    cache.reserve(54)
    cache.commit([0])
    assert cache.length == 31
    for _ in range(3):
        taken = {}
        for count in (20, 29, 30, 31):
            another = target_of("mistral").new_cache(capacity=100, rows=24)
            taken[count] = another.take(cache, count)
        assert taken == {20: False, 29: False, 30: True, 31: True}  # token 30 sees positions from 23 on
        cache = another  # a ring that was filled from one has no more than that had


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [*FAMILIES, "lfm2"])
def test_an_edit_further_up_after_a_reuse(family: str) -> None:
    """A cache that was filled from another one holds what was copied, and no more; of a ring that is all there was."""
    prompt, kept = prompt_of(30), PrefixCache()
    engine = Engine(target_of(family), None, max_rows=1, prefill_chunk=40)
    reused = []
    for text in (prompt, (*prompt, 5, 6), (*prompt[:27], 7), (*prompt[:27], 7, 8), (*prompt[:6], 7)):
        out = engine.generate(text, 9, prefix_cache=kept)
        assert out.token_ids == greedy(family, text, 9)
        reused.append(out.stats.reused_tokens)
    # A window of 8 and a chunk of 30 make 37 slots, and the first text wrote one token more.
    windows = any(spec.window is not None for spec in engine.target.specs)
    assert reused == [0, 30, 27, 28, 0 if windows else 6]


def test_a_cache_of_another_thread_is_not_taken_while_it_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    former, cache = (target_of("mistral").new_cache(capacity=100, rows=24) for _ in range(2))
    former.reserve(30)
    former.length = 30
    parts = ContiguousSlots.parts

    def meanwhile(slots: ContiguousSlots, first: int, last: int) -> Any:
        former.reserve(31 + 24)
        return parts(slots, first, last)

    assert cache.take(former, 30)
    former.reserve(50)
    monkeypatch.setattr(ContiguousSlots, "parts", meanwhile)
    assert not target_of("mistral").new_cache(capacity=100, rows=24).take(former, 30)


def test_a_ring_s_other_slots_hold_numbers() -> None:
    """They are masked, and yet read: a NaN times nothing is a NaN."""
    former, cache = (target_of("mistral").new_cache(capacity=100, rows=24) for _ in range(2))
    former.reserve(60)
    former.length = 60
    for slots, value in ((former, 1.0), (cache, torch.nan)):
        for group in slots.groups:
            group.keys.fill_(value)
            group.values.fill_(value)
    assert cache.take(former, 60)
    for group in cache.groups:
        assert group.keys.isfinite().all()
        assert group.values.isfinite().all()


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", matrix(drafter_names(), first=FEW))
def test_a_drafter_takes_the_steps_that_it_would_take_without(drafter: str, tmp_path: Path) -> None:
    """Those that read hidden states get them for the tokens that are not run again."""
    target, prompt = target_of("llama"), prompt_of(40)
    text = [*prompt, *greedy("llama", prompt, 30), 5, 6]
    for settings in settings_of(drafter, target, tmp_path):
        kept = PrefixCache()
        Engine(target, None, settings, **SIZES).generate(prompt, 30, prefix_cache=kept)
        again = Engine(target, None, settings, **SIZES).generate(text, 20, prefix_cache=kept)
        fresh = Engine(target, None, settings, **SIZES).generate(text, 20)
        assert again.stats.reused_tokens == len(text) - 3
        assert again.token_ids == greedy("llama", tuple(text), 20)
        assert [(step.tokens, step.rows) for step in again.steps] == [(s.tokens, s.rows) for s in fresh.steps]


def test_hidden_states_that_were_not_kept(tmp_path: Path) -> None:
    """Who cannot do without them runs what lacks them, once; others go on from the keys."""
    target, prompt, kept = target_of("llama"), prompt_of(40), PrefixCache()
    reader, plain = Spy(Oracle(prompt, VOCAB)), Engine(target, None)
    reader.taps = frozenset({1})
    needy = Engine(target, None, reader, **SIZES)
    medusa = Engine(target, None, settings_of("medusa", target, tmp_path)[0], **SIZES)
    reused = []
    for engine in (plain, needy, needy, plain, needy, plain, medusa, medusa):
        out = engine.generate(prompt, 8, prefix_cache=kept)
        assert out.token_ids == greedy("llama", prompt, 8)
        reused.append(out.stats.reused_tokens)
    assert reused == [0, 0, 39, 39, 0, 39, 39, 39]


def test_hidden_states_of_a_step_that_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between a commit and their keeping; the text goes on, and theirs would be one behind."""
    target, prompt, kept = target_of("llama"), prompt_of(20), PrefixCache()
    spy = Spy(Oracle([*prompt, *greedy("llama", prompt, 20)], VOCAB))
    spy.taps = frozenset({1})
    engine = Engine(target, None, spy, **SIZES)
    decoding = engine.start(prompt, 20, prefix_cache=kept)
    with target.active():
        decoding.prefill()
        with monkeypatch.context() as patch:
            patch.setattr(KeptText, "keep", lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                decoding.step()
        while decoding.finish_reason is None:
            decoding.step()
    assert engine.generate(decoding.tokens, 1, prefix_cache=kept).stats.reused_tokens == 19  # the prompt's


@pytest.mark.few(1)
@pytest.mark.skipif(library() is None, reason="no C compiler works here")
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("mistral", torch.bfloat16)])
def test_native_layers_keep_every_bit(family: str, dtype: torch.dtype) -> None:
    """Keys, values and logits of a text that goes on from trees, against one prefill of it."""
    target = target_for(new_model(family, dtype, head_dim=16, intermediate_size=64), execution="native")
    prompt, seen = prompt_of(40), []

    def on_seen(context: Any, observation: Any) -> None:
        seen.append((observation.scores, context.cache))

    first = Engine(target, None, **SIZES).generate(prompt, 40)
    oracle, kept = Oracle([*prompt, *first.token_ids], VOCAB), PrefixCache()
    text = [*prompt, *first.token_ids, 5, 6]
    assert Engine(target, None, oracle, **SIZES).generate(prompt, 40, prefix_cache=kept).token_ids == first.token_ids
    for cache in (kept, None):
        out = Engine(target, None, Spy(oracle, on_seen=on_seen), **SIZES).generate(text, 2, prefix_cache=cache)
        assert out.stats.reused_tokens == (0 if cache is None else len(text) - 3)
    (one, mine), (two, fresh) = seen
    assert torch.equal(one.logits, two.logits)
    assert mine.length == fresh.length
    for layer, group in enumerate(mine.group_of):
        slots = group.index((max(0, mine.length - (group.window or mine.length)), mine.length))
        for own, other in ((mine.keys, fresh.keys), (mine.values, fresh.values)):
            assert torch.equal(own[layer][:, :, slots], other[layer][:, :, slots])


def test_samples_are_those_of_the_seed() -> None:
    target, prompt, sampling = target_of("qwen3"), prompt_of(20), SamplingParams(temperature=0.9, seed=4)
    engine, kept = Engine(target, None, "prompt_lookup", **SIZES), PrefixCache()
    first = engine.generate(prompt, 20, sampling, prefix_cache=kept)
    text = [*prompt, *first.token_ids, 3]
    assert (
        engine.generate(text, 20, sampling, prefix_cache=kept).token_ids
        == engine.generate(text, 20, sampling).token_ids
    )


def _weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(2)


def _embedding(model: Any) -> None:
    model.model.embed_tokens.weight = nn.Parameter(model.model.embed_tokens.weight * 2)


def _hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: output * 2)


def _factor(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [_weight, _embedding, _hook, _factor])
def test_a_model_that_was_changed_begins_anew(change: Callable[[Any], None]) -> None:
    """The model's forward follows an edit; kept keys and values do not. After a hook the user calls ``clear``."""
    model, prompt, kept = new_model("llama"), prompt_of(20), PrefixCache()
    engine = Engine(TransformersTarget(model), None)
    engine.generate(prompt, 4, prefix_cache=kept)
    assert engine.generate(prompt, 4, prefix_cache=kept).stats.reused_tokens == 19
    model.train()  # which changes nothing here
    assert engine.generate(prompt, 4, prefix_cache=kept).stats.reused_tokens == 19
    change(model)
    if change in (_hook, _factor):
        kept.clear()
    fresh = engine.generate(prompt, 20)
    again = engine.generate(prompt, 20, prefix_cache=kept)
    assert (again.stats.reused_tokens, again.token_ids) == (0, fresh.token_ids)
    assert again.token_ids != greedy("llama", prompt, 20)


def test_another_model_begins_anew() -> None:
    kept = PrefixCache()
    for _ in range(2):
        engine = Engine(Reciter(whole_text), None)
        assert engine.generate([1, 2, 3], 4, prefix_cache=kept).stats.reused_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("place", ["forward", "commit", "after the commit"])
def test_goes_on_from_what_was_interrupted(steps: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes anywhere, in the middle of a step too."""
    target, kept = Reciter(whole_text), PrefixCache()
    engine = Engine(target, None)
    decoding = engine.start([3, 1, 4, 1, 5], 20, prefix_cache=kept)
    decoding.prefill()
    for _ in range(steps):
        decoding.step()
    owner: Any = target if place == "forward" else decoding.sequence.context.cache
    former = owner.forward if place == "forward" else owner.commit

    def stop(*given: Any, **named: Any) -> None:
        if place != "commit":
            former(*given, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, place.rpartition(" ")[2], stop)
    with pytest.raises(KeyboardInterrupt):
        decoding.step()
    monkeypatch.undo()
    text = [*decoding.tokens, 8, 9]
    again = engine.generate(text, 9, prefix_cache=kept)
    assert again.token_ids == engine.generate(text, 9).token_ids
    assert again.stats.reused_tokens == 4 + steps + (place == "after the commit")


@pytest.mark.parametrize("of", [copy.copy, copy.deepcopy])
def test_a_chat_that_branches(of: Callable[[PrefixCache], PrefixCache]) -> None:
    """Both go on from the same text, and neither has the other's."""
    engine, kept = Engine(target_of("llama")), PrefixCache()
    first = engine.generate(prompt_of(12), 6, prefix_cache=kept)
    text = [*prompt_of(12), *first.token_ids]
    branch = of(kept)
    for number, cache in enumerate((kept, branch)):
        asked = [*text, 5 + number]
        found = engine.generate(asked, 6, prefix_cache=cache)
        assert found.stats.reused_tokens == len(text) - 1
        assert found.token_ids == engine.generate(asked, 6).token_ids


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_what_cannot_be_copied_says_so_and_what_to_do(way: Callable[[Any], Any]) -> None:
    engine = Engine(target_of("qwen3", torch.float32, "native"))
    whole = {
        engine: "call with_drafter",
        engine.target: "share it",
        Scheduler(engine): "another Scheduler",
        PrefixTree(1000): "share it",
        engine.target.new_cache(capacity=4, rows=4): "a new cache",
    }
    if way is pickle.dumps:
        whole[PrefixCache()] = "make a new one"
    for one, remedy in whole.items():
        with pytest.raises(ConfigError, match=f"^{type(one).__name__} can neither be copied nor pickled.*{remedy}"):
            way(one)
    with pytest.raises(ConfigError, match="PrefixTree can neither"):
        copy.copy(PrefixTree(1000))
    assert copy.copy(engine).generate(prompt_of(7), 4).token_ids == engine.generate(prompt_of(7), 4).token_ids
