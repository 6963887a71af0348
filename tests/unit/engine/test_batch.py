"""The scheduler: who is admitted, who waits, who fails alone; and rows of several sequences in one forward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Context, Draft, Engine, SamplingParams, SpecdecWarning
from specdec.costs.curve import roofline
from specdec.costs.policy import AcceptancePolicy
from specdec.costs.prices import UNBATCHED, BatchLoad
from specdec.engine import clocks, decoding
from specdec.engine import engine as engines
from specdec.engine import scheduler as batches
from specdec.engine.requests import Request
from specdec.engine.scheduler import Event, Scheduler
from specdec.errors import ConfigError, PromptError
from specdec.native import library as native
from specdec.step.cache import KVCache
from specdec.step.step_io import Entering, StepInput
from specdec.target import FINAL, run_steps
from tests import models, seam
from tests.fakes import Drawing, Reciter, Scripted
from tests.models import prompt_of, target_for, target_of

HOT = SamplingParams(temperature=0.8, seed=3)


def counting(**options: Any) -> Reciter:
    """Says the next number."""
    return Reciter(lambda text: (text[-1] + 1) % 100, **options)


def numbers(prompt: list[int], count: int) -> list[int]:
    return [(prompt[-1] + place) % 100 for place in range(1, count + 1)]


def sure(context: Context, row_budget: int) -> Draft:
    """As many right guesses as fit, up to five."""
    count = min(row_budget, context.remaining, 6)
    return Draft.chain([(context.root + place) % 100 for place in range(count)])


def in_order(engine: Engine, prompts: list[list[int]], **options: Any) -> Scheduler:
    return Scheduler(engine, [Request(prompt, 8) for prompt in prompts], **options)


def test_prompts_join_as_others_end_and_results_keep_the_order() -> None:
    target, done = counting(), list[int]()
    engine = Engine(target, max_rows=8)
    prompts, budgets = [[place, place + 10] for place in range(6)], [9, 2, 5, 1, 3, 4]
    found = engine.generate_batch(prompts, budgets, batch=3, on_done=lambda place, _: done.append(place))
    assert [one.token_ids for one in found] == [numbers(*each) for each in zip(prompts, budgets, strict=True)]
    assert done != sorted(done)
    assert sorted(done) == list(range(6))
    assert max(target.forwards) <= 3  # prompts of two tokens are one row each
    assert len(target.forwards) < sum(budgets) / 2


@pytest.mark.parametrize("step_rows", [8, 11, 100])
def test_no_forward_has_more_rows_than_it_may(step_rows: int) -> None:
    """Drafts that find no room wait as they are, and long prompts come in bits."""
    target = counting()
    engine = Engine(target, drafter=Several(sure), max_rows=6, prefill_chunk=50)
    sessions: list[Scripted] = engine.drafter.sessions  # type: ignore[attr-defined]
    prompts = [list(range(place, place + (30 if place == 1 else 2))) for place in range(5)]
    found = engine.generate_batch(prompts, 20, batch=4, step_rows=step_rows)
    assert [one.token_ids for one in found] == [numbers(prompt, 20) for prompt in prompts]
    assert max(target.forwards) <= step_rows
    assert all(one.stats.acceptance_lengths == [6, 6, 6, 2] for one in found)
    assert [len(session.rooms) for session in sessions] == [4] * 5  # each draft was proposed once


class Several(Scripted):
    """A session of its own for each sequence."""

    def __init__(self, draft: Any) -> None:
        super().__init__(draft)
        self.sessions: list[Scripted] = []

    def start(self, context: Context) -> Scripted:
        self.sessions.append(Scripted(self.draft).start(context))
        return self.sessions[-1]


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_beginning_is_the_prompt_s_time_and_a_draft_the_step_s(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which nothing takes time but tokenizing, a session's start and a proposal; 0: ``generate``."""
    clock = [0.0]

    def takes(seconds: float, result: Any) -> Any:
        clock[0] += seconds
        return result

    for module in (batches, decoding, engines, clocks):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    encode, start = Engine.encode, Several.start
    monkeypatch.setattr(Engine, "encode", lambda self, prompt: takes(10, encode(self, prompt)))
    monkeypatch.setattr(Several, "start", lambda self, context: takes(1000, start(self, context)))
    engine = Engine(counting(), drafter=Several(lambda context, _: takes(1, Draft.chain([context.root]))))
    prompts = [[1, 2, 3], [4, 5, 6]]
    found = engine.generate_batch(prompts, 4, batch=batch) if batch else [engine.generate([1, 2, 3], 4)]
    for one in found:
        assert one.stats.seconds.prefill == 1000 + 10
        assert one.stats.seconds.draft == one.stats.seconds.decode == 3  # the last token needs none


def test_caches_keep_within_their_bytes() -> None:
    target = target_of("llama")
    engine = Engine(target, max_rows=8)
    one = KVCache.most_bytes(target.specs, capacity=18, rows=10)
    scheduler = in_order(engine, [list(prompt_of(10, seed)) for seed in range(7)], batch=5, cache_bytes=2 * one + 1)
    held, together, ended = 0, 0, 0
    with target.active():
        for events in scheduler.run():
            held, together = max(held, scheduler.cache_bytes), max(together, len(events))
            ended += sum(event.last for event in events)
    assert together == 2
    assert held <= 2 * one
    assert ended == 7


def test_a_failure_is_its_own_prompt_s_alone() -> None:
    def picky(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if int(ids[0, -1]) == 23:
            raise RuntimeError("no 23")
        return scores

    target = counting(context_length=40)
    prompts: list[Any] = [[1], [], [20, 21], list(range(60)), [5, 6], [7, 777]]
    with pytest.warns(SpecdecWarning, match=r"4 of 6 prompts failed: 1 \(the prompt is empty.*2 \(no 23\)"):
        found = Engine(target).generate_batch(prompts, 6, batch=2, logits_processor=[picky])
    assert [one.finish_reason for one in found] == ["length", "error", "error", "error", "length", "error"]
    assert found[0].token_ids == numbers([1], 6)
    assert found[4].token_ids == numbers([6], 6)
    assert found[2].token_ids == [22, 23]
    assert "context holds 40" in str(found[3].error)


def test_a_text_that_no_cache_can_hold_fails_by_name() -> None:
    engine = Engine(target_of("llama"), max_rows=8)
    with pytest.warns(SpecdecWarning, match="1 of 2 prompts failed: 1 "):
        found = engine.generate_batch([prompt_of(3), prompt_of(3)], [4, 200], cache_bytes=20_000)
    assert [one.finish_reason for one in found] == ["length", "error"]
    assert "cache_bytes is 20000; lower max_new_tokens" in str(found[1].error)


def drained(scheduler: Scheduler) -> dict[int, Event]:
    """The last event of each request."""
    return {event.index: event for events in scheduler.run() for event in events if event.last}


def test_requests_join_while_others_run_from_another_thread_too() -> None:
    target = counting()
    scheduler = Scheduler(Engine(target, max_rows=8), batch=4)
    assert scheduler.idle
    assert scheduler.step() == []
    handles = [scheduler.submit(Request([2], 6))]
    assert not scheduler.idle
    assert [len(event.step.tokens) for event in scheduler.step() if event.step] == [1]
    thread = Thread(target=lambda: handles.append(scheduler.submit(Request([50], 6))))
    thread.start()
    thread.join()
    assert {event.index for event in scheduler.step()} == {handle.index for handle in handles}
    found = drained(scheduler)
    assert scheduler.idle
    assert [found[handle.index].generation().token_ids for handle in handles] == [numbers([2], 6), numbers([50], 6)]
    with pytest.raises(PromptError, match="the prompt is empty"):
        scheduler.submit(Request([], 6))
    assert scheduler.idle


def test_a_cancelled_request_ends_at_the_next_step_and_its_cache_goes() -> None:
    target = target_of("llama")
    scheduler = Scheduler(Engine(target, max_rows=8), batch=2)
    running, neighbour, waiting = (scheduler.submit(Request(prompt_of(5, seed), 9)) for seed in range(3))
    scheduler.step()  # the prompts but their last tokens
    scheduler.step()
    held = scheduler.cache_bytes
    scheduler.cancel(running)
    scheduler.cancel(waiting)
    events = scheduler.step()
    ended = {event.index: event.generation() for event in events if event.last}
    assert {index: one.finish_reason for index, one in ended.items()} == dict.fromkeys((0, 2), "cancelled")
    assert len(ended[running.index].token_ids) == 1
    assert [event.chunk().finish_reason for event in events if event.cancelled] == ["cancelled"] * 2
    assert scheduler.cache_bytes == held // 2
    expected = Engine(target, max_rows=8).generate(prompt_of(5, 1), 9).token_ids
    assert drained(scheduler)[neighbour.index].generation().token_ids == expected
    scheduler.cancel(neighbour)  # has ended
    assert scheduler.step() == []


def test_where_the_shared_forward_raises_only_the_rows_that_raise_alone_end() -> None:
    class Fragile(Reciter):
        def forward(self, step: StepInput) -> Any:
            if 33 in step.ids:
                raise RuntimeError("no 33")
            return super().forward(step)

    prompts = [[1], [30], [60], [32]]
    with pytest.warns(SpecdecWarning, match=r"2 of 4 prompts failed: 1 \(no 33\); 3 \(no 33\)"):
        found = Engine(Fragile(lambda text: (text[-1] + 1) % 100)).generate_batch(prompts, 6, batch=4)
    assert [one.finish_reason for one in found] == ["length", "error", "length", "error"]
    assert [one.token_ids for one in found] == [numbers([1], 6), [31, 32, 33], numbers([60], 6), [33]]


def test_a_request_may_have_another_drafter_and_fewer_rows() -> None:
    """Each spec is made once, however it is written, and its sessions draft for its requests alone."""
    target = counting()
    mine, other = Several(sure), Several(sure)
    engine = Engine(target, None, mine, max_rows=8)
    scheduler = Scheduler(engine, batch=8)
    specs: list[Any] = [None, other, other, "none", {"name": "none"}, "prompt_lookup"]
    handles = [scheduler.submit(Request([10 * place], 9, drafter=spec)) for place, spec in enumerate(specs)]
    handles.append(scheduler.submit(Request([70], 9, drafter=other, max_rows=2)))
    assert len(scheduler._engines) == 3
    ended = drained(scheduler)
    found = [ended[handle.index].generation() for handle in handles]
    assert [one.token_ids for one in found] == [numbers([10 * place], 9) for place in (0, 1, 2, 3, 4, 5, 7)]
    assert [{step.drafter for step in one.steps} for one in found[3:6]] == [{"none"}, {"none"}, {"prompt_lookup"}]
    assert [len(drafter.sessions) for drafter in (mine, other)] == [1, 3]
    assert [max(one.stats.rows) for one in found] == [6, 6, 6, 1, 1, 1, 2]
    for request, message in (
        (Request([1], 9, drafter="nun"), "unknown drafter 'nun'"),
        (Request([1], 9, max_rows=9), "max_rows is 9, and the engine's is 8"),
        (Request([1], 9, max_rows=0), "max_rows is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            scheduler.submit(request)


def test_a_session_sees_its_own_taps_and_no_other_s() -> None:
    """The forward has the hidden states and the likeliest tokens that any of its sequences reads."""
    target, seen = target_of("llama"), dict[int, list[Any]]()
    read, forward = set[tuple[frozenset[int], int]](), target.forward

    class Tapping(Several):
        def __init__(self, taps: set[int], top_k: int) -> None:
            super().__init__(lambda context, _: Draft.chain([context.root, 3]))
            self.taps, self.top_k = frozenset(taps), top_k

        def start(self, context: Context) -> Scripted:
            session = super().start(context)
            seen[self.top_k] = session.seen
            return session

    def watched(step: StepInput) -> Any:
        read.add((frozenset(step.wanted.hidden), step.wanted.top_k))
        return forward(step)

    engine = Engine(target, None, "none", max_rows=8)
    scheduler = Scheduler(engine, batch=3)
    drafters = [Tapping({1, FINAL}, 2), Tapping({2}, 3), Tapping(set(), 1)]
    handles = [scheduler.submit(Request(prompt_of(5), 9, drafter=drafter)) for drafter in drafters]
    target.forward = watched  # type: ignore[method-assign]
    try:
        ended = drained(scheduler)
        texts = [ended[handle.index].generation().token_ids for handle in handles]
    finally:
        target.forward = forward  # type: ignore[method-assign]
    assert read == {(frozenset({1, 2, FINAL}), 0), (frozenset({1, 2, FINAL}), 3)}
    assert texts == [engine.generate(prompt_of(5), 9).token_ids] * 3
    for drafter in drafters:
        assert {frozenset(one.taps) for one in seen[drafter.top_k]} == {drafter.taps}
        assert all(len(one.taps) == len(drafter.taps) for one in seen[drafter.top_k])


def column(values: Sequence[int]) -> Any:
    """A column of a table, which is no sequence."""
    return SimpleNamespace(tolist=lambda: list(values))


def test_one_for_all_or_one_for_each() -> None:
    engine = Engine(target_of("qwen3"), max_rows=8)
    prompts = [prompt_of(5), prompt_of(9), prompt_of(5)]
    params = [HOT, None, SamplingParams(temperature=1.2)]
    found = engine.generate_batch(prompts, [6, 7, 8], params, seed=[1, 2, 3], batch=2)
    for place, seed in enumerate((1, 2, 3)):
        own = params[place] or SamplingParams()
        own = SamplingParams(temperature=own.temperature, seed=seed)
        assert found[place].token_ids == engine.generate(prompts[place], 6 + place, own).token_ids
    same = engine.generate_batch([prompt_of(5)] * 2, 12, HOT)
    assert same[0].token_ids == same[1].token_ids
    other = engine.generate_batch([prompt_of(5)] * 2, 12, HOT, seed=[3, 4])
    assert other[0].token_ids == same[0].token_ids != other[1].token_ids


@pytest.mark.parametrize(
    "kind",
    [np.array, torch.tensor, tuple, deque, lambda values: range(min(values), max(values) + 1), column],
    ids=["array", "tensor", "tuple", "deque", "range", "column"],
)
def test_one_for_each_in_any_order_of_numbers(kind: Any) -> None:
    engine, prompts = Engine(target_of("qwen3"), max_rows=8), [prompt_of(5)] * 3
    expected = engine.generate_batch(prompts, [4, 5, 6], HOT, seed=[1, 2, 3])
    found = engine.generate_batch(prompts, kind([4, 5, 6]), HOT, seed=kind([1, 2, 3]))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [len(one.token_ids) for one in found] == [4, 5, 6]


def test_end_tokens_as_an_array_are_for_all_and_arrays_for_each() -> None:
    engine, prompts = Engine(counting()), [[1], [2], [3]]

    def lengths(ends: Any) -> list[int]:
        return [len(one.token_ids) for one in engine.generate_batch(prompts, 9, stop_token_ids=ends)]

    for ends in ([5, 6], np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), 6]):
        assert lengths(ends) == [4, 3, 2]
    for ends in ([[4], [5], [6]], np.array([[4], [5], [6]]), [np.array([4]), torch.tensor([5]), (np.int8(6),)]):
        assert lengths(ends) == [3, 3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": np.array([1, 2, 3])}, "max_new_tokens has 3 values for 2 prompts"),
        ({"seed": torch.tensor([1])}, "seed has 1 values for 2 prompts"),
        ({"seed": {1, 2}}, r"seed is \{1, 2\}, of type set; it must be an integer"),
        ({"prompts": "one text"}, "prompts is one prompt"),
        ({"max_new_tokens": [1, 2, 3]}, "max_new_tokens has 3 values for 2 prompts"),
        ({"seed": [1]}, "seed has 1 values for 2 prompts"),
        ({"stop": [["a"]]}, "stop has 1 values for 2 prompts"),
        ({"batch": 0}, "batch is 0"),
        ({"step_rows": 4}, "step_rows is 4, and one draft may have max_rows = 8 rows"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(counting(), max_rows=8).generate_batch(**{"prompts": [[1], [2]], **options})


@pytest.mark.slow
def test_stops_and_streams_add_up(tiny_engine: Engine) -> None:
    prompts = ["import re\nimport", "def add(a, b):\n", "class A:\n"]
    stops = [["\n"], ["return", "("], ["\n\n"]]
    expected = [tiny_engine.generate(text, 12, stop=stop) for text, stop in zip(prompts, stops, strict=True)]
    found = tiny_engine.generate_batch(prompts, 12, stop=stops, batch=2)
    assert [(one.text, one.finish_reason) for one in found] == [(one.text, one.finish_reason) for one in expected]
    texts, reasons = [""] * 3, list[Any]([None] * 3)
    for place, chunk in tiny_engine.stream_batch(prompts, 12, stop=stops, batch=2):
        texts[place] += chunk.text
        reasons[place] = chunk.finish_reason
    assert texts == [one.text for one in expected]
    assert reasons == [one.finish_reason for one in expected]


def test_what_was_done_before_an_interrupt_is_not_lost() -> None:
    done: dict[int, Any] = {}

    def note(place: int, generation: Any) -> None:
        done[place] = generation.token_ids
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine(counting()).generate_batch([[place] for place in range(8)], 5, batch=2, on_done=note)
    assert done == {place: numbers([place], 5) for place in (0, 1, 2)}


def test_drawn_drafts_do_not_depend_on_the_neighbours() -> None:
    """Under ``reject`` the rows proposed decide the text at a seed, so that a policy must not look at the batch."""
    target = target_of("llama")
    q = torch.softmax(torch.randn(target.vocab_size, target.vocab_size, dtype=torch.float64), -1)
    engine = Engine(target, None, Drawing(q, (1,) * 6), policy="acceptance", costs=roofline(), max_rows=8)
    engine.drafter.fixed_cost_rows = 0
    prompts = [prompt_of(size) for size in (4, 9, 3, 5)]
    expected = [engine.generate(prompt, 30, HOT) for prompt in prompts]
    found = engine.generate_batch(prompts, 30, HOT, batch=4)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.stats.rows for one in found] == [one.stats.rows for one in expected]
    assert len({rows for one in found for rows in one.stats.rows}) > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("acceptance", ["reject", "typical"])
def test_rules_by_which_chosen_rows_decide_the_text(acceptance: str) -> None:
    """Where they judge rows that were chosen, too, a policy must not look at the batch for any drafter."""
    sampling = SamplingParams(temperature=0.4, seed=3, acceptance=acceptance, allow_lossy=acceptance == "typical")
    engine = Engine(target_of("llama"), None, "prompt_lookup", policy="acceptance", costs=roofline(), max_rows=8)
    prompts = [prompt_of(size) * 2 for size in (4, 9, 3, 5)]
    found = engine.generate_batch(prompts, 30, sampling, batch=4)
    assert [one.token_ids for one in found] == [engine.generate(prompt, 30, sampling).token_ids for prompt in prompts]


def test_rows_are_dearer_in_a_crowd() -> None:
    """By the curve at the rows of all, in a sequence's share of a plain step; drafting as well."""
    curve = roofline()  # a tenth of a plain step for each more row
    assert curve.steps(0, 3) == pytest.approx([0, 1, 1.1, 1.2])
    share = 1.7 / 8  # of a forward of eight rows
    policy = AcceptancePolicy(curve)
    policy.prices.batch_load = BatchLoad(8, 20)
    assert policy.prices.plain(0) == pytest.approx(share)
    assert [policy.prices.step(0, rows) for rows in (1, 2, 3)] == pytest.approx([1, 1 + 0.1 / share, 1 + 0.2 / share])
    policy.prices.batch_load = UNBATCHED
    alone = policy.row_budget(24, 0)
    policy.prices.batch_load = BatchLoad(8, 7)
    assert 1 < policy.row_budget(24, 0) < alone
    policy.prices.batch_load = UNBATCHED
    assert policy.row_budget(24, 0) == alone


@pytest.mark.few(2)
@pytest.mark.skipif(native.library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_rows_of_several_sequences_are_each_one_s_own_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    """A tree, a lone root, a chunk of a prompt over several groups of rows, a ring that has turned; on any threads."""
    sizes = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = target_for(models.new_model(family, dtype, **sizes), execution="native")
    tree = Draft((3, 4, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 2, 3, 5))

    drafts = (tree, Draft.chain([4]), Draft.chain(prompt_of(19)), tree)

    def texts() -> list[seam.Text]:
        return [seam.text(target, capacity=64, rows=24).fill(prompt_of(length), 8) for length in (5, 1, 21, 30)]

    threads = torch.get_num_threads()
    try:
        with target.active():
            alone = [own.run(draft, taps=(2,)) for own, draft in zip(texts(), drafts, strict=True)]
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found = seam.run_together(texts(), drafts, taps=(2,))
                assert found.logits is not None
                for last, draft, own in zip(accumulate(map(len, drafts)), drafts, alone, strict=True):
                    rows = slice(last - len(draft), last)
                    assert torch.equal(found.logits[rows], own.logits), (count, draft)
                    assert torch.equal(found.hidden[2][rows], own.hidden[2])
    finally:
        torch.set_num_threads(threads)


def test_a_forward_of_several_gives_each_its_own() -> None:
    """Logits of the rows asked for, hidden states and taps; who comes in behind a layer has no tap before it."""
    target, prompts = target_of("llama"), (prompt_of(3), prompt_of(5, 1), prompt_of(2, 2), prompt_of(4, 3))
    wanted = (None, (1, 4), (), (0, 3))
    with target.active():

        def parts(enters: bool) -> list[StepInput]:
            texts, entries = [seam.text(target, capacity=16, rows=8) for _ in prompts], [None] * len(prompts)
            if enters:
                entries[1] = Entering(1, texts[1].run(prompts[1], exit_layer=1).out)
            each = zip(texts, prompts, wanted, entries, strict=True)
            taps = (0, 1, FINAL)
            return [own.rows(ids, **seam.asked(taps=taps, rows=rows, entry=entry)) for own, ids, rows, entry in each]

        for enters in (False, True):
            alone = [target.forward(part) for part in parts(enters)]
            for own, found, rows in zip(alone, run_steps(target, parts(enters)), wanted, strict=True):
                torch.testing.assert_close(found.out, own.out)
                assert found.hidden.keys() == own.hidden.keys()
                assert len(found.hidden) == len(own.hidden)
                assert (found.hidden.get(0) is None) == (0 not in own.hidden)
                for layer in own.hidden:
                    torch.testing.assert_close(found.hidden[layer], own.hidden[layer])
                assert (found.logits is None) == (own.logits is None) == (rows == ())
                if own.logits is not None:
                    torch.testing.assert_close(found.logits, own.logits)
                    assert found.rows == own.rows == (None if rows is None else [*rows])


@pytest.mark.slow
def test_many_prompts_under_a_bound() -> None:
    """None is lost, none comes twice, and no cache outlives its text."""
    target, alive = target_of("llama"), weakref.WeakSet[KVCache]()
    engine = Engine(target, None, "prompt_lookup", max_rows=8)
    prompts = [prompt_of(3 + place % 17, place) for place in range(300)]
    bound = 5 * KVCache.most_bytes(target.specs, capacity=26, rows=19)
    seen, most, caches, new_cache = list[int](), 0, 0, target.new_cache

    def watched(**sizes: int) -> KVCache:
        cache = new_cache(**sizes)
        alive.add(cache)
        return cache

    target.new_cache = watched  # type: ignore[method-assign]
    try:
        requests = [Request(prompt, 1 + place % 7) for place, prompt in enumerate(prompts)]
        scheduler = Scheduler(engine, requests, batch=8, cache_bytes=bound)
        with target.active():
            for events in scheduler.run():
                most, caches = max(most, scheduler.cache_bytes), max(caches, len(alive))
                for event in events:
                    if event.last:
                        seen.append(event.index)
                        assert len(event.generation().token_ids) == 1 + event.index % 7
                del events
    finally:
        target.new_cache = new_cache  # type: ignore[method-assign]
    assert sorted(seen) == list(range(300))
    assert most <= bound
    assert caches <= 17  # eight that ran in the step before, and those of the next
