"""Passes of several sequences are run as one: as many as one sequence takes, and to each its own answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.draft_model import DraftModel, DraftModelConfig
from drafters.kangaroo.drafter import Kangaroo, KangarooConfig, KangarooSession
from drafters.medusa.drafter import Medusa, MedusaConfig
from drafters.union.drafter import Union, UnionConfig
from specdec import Draft, Engine, Generation, Observation, SamplingParams, SpecdecWarning, TransformersTarget
from specdec.drafter import BatchedSession, Context, Drafter, DrafterBase
from specdec.engine import clocks, decoding
from specdec.engine import engine as engines
from specdec.engine import scheduler as batches
from specdec.engine.clocks import TimedDrafter
from specdec.errors import DraftError
from specdec.native import library as native
from specdec.step.forward_passes import Pass, Passes, run_together, waiting_for
from tests.fakes import Reciter
from tests.models import new_model, prompt_of, random_adapter, random_heads, target_for, target_of
from tests.tiers import each_once

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
HOT = SamplingParams(temperature=0.8, seed=3)
PROMPTS = [prompt_of(size) for size in (7, 1, 40, 2, 19)]
BUDGETS = [12, 24, 9, 1, 17]
SIZES = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


def native_target(dtype: torch.dtype, seed: int = 1) -> TransformersTarget:
    model = new_model("llama", dtype, seed=seed, **SIZES)
    return target_for(model, execution="native")


def drafter_of(name: str, target: TransformersTarget, tmp: Path, model: TransformersTarget | None = None) -> Drafter:
    """One that runs a model; an adapter that is a whole layer, which on a native target is native, too."""
    if name == "kangaroo":
        adapter = random_adapter(target, tmp / name, variant="layer")  # an untrained one does not attend
        with torch.no_grad():
            for weight in (adapter.o_proj.weight, adapter.down_proj.weight):
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
        adapter.save_pretrained(tmp / name)
        config = KangarooConfig(adapter=str(tmp / name), eta=0.5, gamma=4, branch=2)
        return Kangaroo.build(config, target)
    if name == "draft_model":
        return DraftModel(DraftModelConfig(tokens=3, widths=[2], min_confidence=0.05), model or target)
    if name == "medusa":
        random_heads(target, tmp / name)
        return Medusa.build(
            MedusaConfig(heads=str(tmp / name), tree=[[0], [0, 0], [1]] if model is None else None), target
        )
    return Union(UnionConfig(), [drafter_of(part, target, tmp, model) for part in ("draft_model", "medusa")])


class Calls(Counter[str]):
    """How often models and heads are run to draft."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafter: Any, target: TransformersTarget) -> None:
        super().__init__()
        self._patch = monkeypatch.setattr
        for part in getattr(drafter, "parts", [drafter]):
            if isinstance(part, Kangaroo):
                self.count(target, "forward", lambda step: step.plan.last is not None)
                self.count(part.adapter, "guess")
            elif isinstance(part, DraftModel):
                self.count(part.model, "forward")
            else:
                self.count(part.step, "each")

    def count(self, owner: Any, method: str, when: Callable[[Any], bool] = lambda brought: True) -> None:
        inner = getattr(owner, method)

        def counting(*given: Any, **options: Any) -> Any:
            self[f"{type(owner).__name__}.{method}"] += when(*given)
            return inner(*given, **options)

        self._patch(owner, method, counting)

    def of(self, call: Callable[[], Any]) -> dict[str, int]:
        self.clear()
        call()
        return dict(self)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kangaroo", "draft_model", "medusa", "union"])
def test_four_sequences_take_the_passes_of_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama")
    drafter = drafter_of(name, target, tmp_path, TransformersTarget(new_model("llama", seed=2)))
    engine, calls = Engine(target, None, drafter, max_rows=24), Calls(monkeypatch, drafter, target)
    one = calls.of(lambda: engine.generate(prompt_of(9), 20))
    assert min(one.values()) > 3
    assert calls.of(lambda: engine.generate_batch([prompt_of(9)] * 4, 20, batch=4)) == one
    each = [calls.of(lambda prompt=prompt: engine.generate(prompt, 20)) for prompt in PROMPTS]  # type: ignore[misc]
    all_of_them = calls.of(lambda: engine.generate_batch(PROMPTS, 20, batch=5))
    assert all(all_of_them[part] < 2 * max(own[part] for own in each) for part in one)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("name", ["kangaroo", "draft_model"])
def test_what_is_drawn_from_waits_for_nobody_unless_rows_round_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``reject`` q decides the text, so where it would round with the batch, each sequence has it made alone."""
    for target, times in ((native_target(torch.float32), 1), (target_of("llama", torch.float32, execution="fused"), 4)):
        drafter, drawn = drafter_of(name, target, tmp_path / str(times)), replace(HOT, acceptance="reject")
        engine = Engine(target, None, drafter, max_rows=24)
        with monkeypatch.context() as patch:
            calls = Calls(patch, drafter, target)
            one = calls.of(lambda: engine.generate(prompt_of(9), 20, drawn))  # noqa: B023
            four = calls.of(lambda: engine.generate_batch([prompt_of(9)] * 4, 20, drawn, batch=4))  # noqa: B023
        if name == "draft_model" and times == 4:  # it is the target here, which verifies for all of them at once
            assert four["DescribedTarget.forward"] > 2 * one["DescribedTarget.forward"]
        else:
            assert four == {part: times * count for part, count in one.items()}


def same(found: Sequence[Generation], expected: Sequence[Generation]) -> bool:
    """In what was drafted, too."""
    return [(one.token_ids, one.stats.rows, one.stats.acceptance_lengths, one.logprobs) for one in found] == [
        (one.token_ids, one.stats.rows, one.stats.acceptance_lengths, one.logprobs) for one in expected
    ]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"), each_once(["kangaroo", "draft_model", "medusa", "union"], [torch.float32, torch.bfloat16])
)
def test_native_drafts_are_those_of_one_by_one(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, rejection among it, while others join, leave and wait for room."""
    target = native_target(dtype)
    drafter = drafter_of(name, target, tmp_path, native_target(dtype, seed=2))
    engine = Engine(target, None, drafter, max_rows=12, prefill_chunk=16)
    for sampling in (SamplingParams(), HOT, SamplingParams(temperature=0.8, seed=3, acceptance="match")):
        expected = [
            engine.generate(prompt, new, sampling, logprobs=1) for prompt, new in zip(PROMPTS, BUDGETS, strict=True)
        ]
        for batch in (3, 7):
            found = engine.generate_batch(PROMPTS, BUDGETS, sampling, batch=batch, step_rows=26, logprobs=1)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            assert [one.logprobs for one in found] == [one.logprobs for one in expected]
            # Heads of Medusa may round otherwise beside others, and a union learns from all texts.
            assert name in ("medusa", "union") or same(found, expected), (sampling, batch)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["kangaroo", "draft_model", "medusa"])
def test_answers_go_to_who_asked(name: str, tmp_path: Path) -> None:
    """In float64 the same drafts are accepted as by itself, so that nobody drafts with another's numbers."""
    target = target_of("llama")
    engine = Engine(target, None, drafter_of(name, target, tmp_path), max_rows=24)
    expected = [engine.generate(prompt, 24) for prompt in PROMPTS]
    if name == "kangaroo":  # drafts end by what the adapter says
        assert {rows for one in expected for rows in one.stats.rows} >= {3, 4, 5}
    assert len({length for one in expected for length in one.stats.acceptance_lengths}) > 1
    assert same(engine.generate_batch(PROMPTS, 24, batch=4), expected)


class Doubling(DrafterBase):
    """Has a pass double a number, and proposes it."""

    name = "doubling"
    draws = False

    def __init__(self, odd: Callable[[int], Any] = lambda token: None) -> None:
        self.odd, self.together = odd, list[int]()

    def start(self, context: Context) -> DoublingSession:
        return DoublingSession(self, context)

    def double(self, tokens: Sequence[int]) -> list[int]:
        self.together.append(len(tokens))
        if 13 in tokens:
            raise RuntimeError("no 13")
        return [2 * token % 100 for token in tokens]


class DoublingSession(BatchedSession):
    def __init__(self, drafter: Doubling, context: Context) -> None:
        self._drafter, self._context = drafter, context

    def passes(self, row_budget: int) -> Passes[Draft]:
        double = yield Pass(self._drafter.double, self._context.root)
        self._drafter.odd(self._context.root)
        again = yield Pass(self._drafter.double, double)
        return Draft.chain([self._context.root, double, again])

    def observe(self, seen: Observation) -> None:
        pass


def test_a_session_that_fails_between_passes_fails_alone() -> None:
    def odd(token: int) -> None:
        if token == 48:
            raise DraftError("48 is odd")

    engine = Engine(Reciter(lambda text: 2 * text[-1] % 100), None, Doubling(odd), max_rows=8)
    with pytest.warns(SpecdecWarning, match=r"1 of 4 prompts failed: 3 \(drafter 'doubling': 48 is odd\)"):
        found = engine.generate_batch([[1], [3], [5], [7]], 12, batch=4)
    assert [one.finish_reason for one in found] == ["length", "length", "length", "error"]
    assert found[3].token_ids == [14, 28, 56, 12, 24, 48]
    assert found[2].token_ids == [10, 20, 40, 80, 60, 20, 40, 80, 60, 20, 40, 80]
    assert max(engine.drafter.together) == 4  # type: ignore[attr-defined]


def test_a_pass_that_fails_ends_those_who_waited_for_it() -> None:
    engine = Engine(Reciter(lambda text: (text[-1] + 1) % 100), None, Doubling(), max_rows=8)
    with pytest.raises(RuntimeError, match="no 13"):
        engine.generate([12], 5)
    with pytest.warns(SpecdecWarning, match=r"2 of 4 prompts failed: 0 \(no 13\); 1 \(no 13\)"):
        found = engine.generate_batch([[12], [30], [14], [15]], 5, batch=2)
    assert [one.finish_reason for one in found] == ["error", "error", "length", "length"]


def test_what_is_no_pass_is_named() -> None:
    class Odd(DoublingSession):
        def passes(self, row_budget: int) -> Passes[Draft]:
            yield self._context.root  # type: ignore[misc]
            return Draft.chain([self._context.root])

    target, drafter = Reciter(lambda text: 5), Doubling()
    drafter.start = lambda context: Odd(drafter, context)  # type: ignore[method-assign]
    with pytest.raises(DraftError, match="drafter 'doubling': a session waits for 3, of type int; yield a Pass"):
        Engine(target, None, drafter).generate([3], 5)


def test_an_interrupt_in_a_round_ends_it_and_leaves_nothing_behind() -> None:
    drafter, done = Doubling(), dict[int, Any]()
    engine, ask = Engine(Reciter(lambda text: 2 * text[-1] % 100), None, drafter, max_rows=8), drafter.double

    def interrupted(tokens: Sequence[int]) -> list[int]:
        if 92 in tokens:
            raise KeyboardInterrupt
        return ask(tokens)

    drafter.double = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch(
            [[1], [3], [5]], [3, 12, 12], batch=3, on_done=lambda place, one: done.update({place: one})
        )
    assert {place: one.token_ids for place, one in done.items()} == {0: [2, 4, 8]}
    drafter.double = ask  # type: ignore[method-assign]
    found = engine.generate_batch([[3], [5]], 6)
    assert [one.token_ids for one in found] == [[6, 12, 24, 48, 96, 92], [10, 20, 40, 80, 60, 20]]


def test_an_answer_for_each() -> None:
    error = ValueError("no")

    def failing(brought: Sequence[int]) -> list[int]:
        raise error

    def doubling(brought: Sequence[int]) -> list[int]:
        return [2 * number for number in brought]

    def losing(brought: Sequence[int]) -> Sequence[int]:
        return brought[1:]

    runs = (doubling, failing, doubling, losing, losing, failing, doubling)
    found = run_together([Pass(run, place) for place, run in enumerate(runs)])
    assert [found[place] for place in (0, 2, 6)] == [0, 4, 12]
    assert found[1] is found[5] is error
    assert isinstance(found[3], DraftError)
    assert "gave 1 answers to 2 passes; it must give one to each" in str(found[3])


def test_time_is_shared_and_others_time_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(clocks, "perf_counter", lambda: clock[0])

    def takes(seconds: float) -> None:
        clock[0] += seconds

    def slow(brought: Sequence[int]) -> Sequence[int]:
        takes(8)
        return brought

    class Session(BatchedSession):
        def passes(self, row_budget: int) -> Passes[Any]:
            takes(1)
            answer = yield Pass(slow, row_budget, row_budget > 8)
            takes(2)
            return f"got {answer}"

        def observe(self, seen: Any) -> None:
            takes(4)

    class Slow(DrafterBase):
        name = "slow"

        def start(self, context: Any) -> Any:
            return Session()

    drafters = [TimedDrafter(Slow(())) for _ in range(4)]
    sessions: list[Any] = [drafter.start(None) for drafter in drafters]  # type: ignore[arg-type]
    made = [session.passes(rows) for rows, session in enumerate(sessions, 5)]
    asked = [next(passes) for passes in made]
    takes(100)  # somebody else drafts
    for rows, passes, answer in zip(range(5, 9), made, run_together(asked), strict=True):
        takes(100)
        with pytest.raises(StopIteration) as done:
            passes.send(answer)
        assert done.value.value == f"got {rows}"
    assert [drafter.drafting.seconds for drafter in drafters] == [1 + 8 / 4 + 2] * 4
    drafters[0].drafting.clear()
    with pytest.raises(StopIteration) as done:
        next(waiting_for(sessions[0].passes(5), together=False))  # runs it here and now
    assert done.value.value == "got 5"
    sessions[0].observe(None)
    assert drafters[0].drafting.seconds == 1 + 8 + 2 + 4
    assert next(waiting_for(sessions[0].passes(9), together=False)).batch_invariant
    assert not any(hasattr(sessions[0], further) for further in ("readback", "sources"))


def test_a_step_s_drafting_is_its_own_and_its_share_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which only passes take time, 8 each, and 1 between them."""
    clock, double = [0.0], Doubling.double

    def takes(seconds: float, result: Any = None) -> Any:
        clock[0] += seconds
        return result

    for module in (batches, decoding, engines, clocks):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Doubling, "double", lambda self, tokens: takes(8, double(self, tokens)))
    engine = Engine(Reciter(lambda text: 50), None, Doubling(lambda _: takes(1)), max_rows=8)
    for one in engine.generate_batch([[1], [3]], 3, batch=2):  # two drafts each, as the last token needs none
        assert one.stats.seconds.draft == one.stats.seconds.decode == 2 * (1 + 2 * 8 / 2)


def test_a_session_of_two_methods_goes_on_as_before(tmp_path: Path) -> None:
    """One that is around another drafts by itself, and what it changes is not passed over."""

    class Shortened(Kangaroo):
        def start(self, context: Context) -> Any:
            return Around(super().start(context))

    class Around:
        def __init__(self, inner: KangarooSession) -> None:
            self._inner = inner

        def propose(self, row_budget: int) -> Draft:
            return self._inner.propose(min(row_budget, 2))

        def observe(self, seen: Observation) -> None:
            self._inner.observe(seen)

    target = target_of("llama")
    random_adapter(target, tmp_path)
    engine = Engine(target, None, Shortened.build(KangarooConfig(adapter=str(tmp_path), eta=0.0), target))
    found = engine.generate_batch(PROMPTS, 12, batch=3)
    assert [one.token_ids for one in found] == [engine.generate(prompt, 12).token_ids for prompt in PROMPTS]
    assert {rows for one in found for rows in one.stats.rows} == {1, 2}
