"""A step's rows over several ranks: plain decoding's own text on each of them, under every drafter that may be split.

Ranks are threads here (``tests.ranks``), each with a model of its own; ``test_processes.py`` has them as processes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from specdec import Draft, Drafter, Engine, Generation, PrefixCache, SamplingParams
from specdec.drafting.registry import drafter_names, make_drafter
from specdec.errors import ConfigError, NumericalError, ParallelError
from specdec.models.transformers_target import TransformersTarget
from specdec.parallel.ranks import Ranks
from specdec.parallel.rows import ShardedTarget
from specdec.step.step_io import StepInput
from specdec.step.step_output import StepOutput
from tests.fakes import Drawing, Oracle, Scripted
from tests.models import greedy, new_model, prompt_of, settings_of, target_for, target_of
from tests.ranks import ThreadRanks, results, run_ranks
from tests.tiers import each_once, turns

PROMPT, NEW = prompt_of(7), 28
SAMPLING = SamplingParams(temperature=0.8, seed=5)
WIDE = {"name": "lookahead", "window": 15, "ngram": 5, "guesses": 15}
UNBATCHED = (
    "dflash",
    "eagle",
    "kangaroo",
    "layer_skip",
    "mtp",
    "none",
)  # reads layers of all rows; runs layers by itself; has nothing to split

_LOADING = threading.Lock()  # while a model is loaded, the default dtype of all threads is another
Ask = Callable[[Engine], Any]


class Together:
    """Some ranks, each with its own target around a model of its own."""

    def __init__(self, family: str, size: int, execution: str = "", **changes: Any) -> None:
        self.size, self._execution = size, execution or ("fused" if family == "lfm2" else "modules")
        self._models = [new_model(family, **changes) for _ in range(size)]

    def run(self, drafter: Any, ask: Ask, *, spoil: Callable[[ShardedTarget, int], None] | None = None) -> list[Any]:
        """What ``ask`` returned or raised on each rank."""

        def work(ranks: ThreadRanks) -> Any:
            target = ShardedTarget(target_for(self._models[ranks.rank], execution=self._execution), ranks=ranks)
            if spoil is not None:
                spoil(target, ranks.rank)
            with _LOADING:
                made = make_drafter(drafter(ranks.rank) if callable(drafter) else drafter, target)
            return ask(Engine(target, None, made))

        return run_ranks(self.size, work)


def rows_run(target: ShardedTarget) -> list[int]:
    """From now on, the rows of each step that this rank runs."""
    own, found = target._target, list[int]()
    run = own.forward

    def counted(step: StepInput) -> Any:
        found.append(step.rows)
        return run(step)

    own.forward = counted  # type: ignore[method-assign]
    return found


@cache
def text_of(family: str, sampling: SamplingParams | None) -> list[int]:
    if sampling is None:
        return greedy(family, PROMPT, NEW)
    return Engine(target_of(family)).generate(PROMPT, NEW, sampling).token_ids


FAMILIES = ("llama", "mistral", "gemma3", "lfm2")
SAMPLINGS = (None, SAMPLING)
SIZES = (2, 3)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "family", "sampling", "size"),
    turns([name for name in drafter_names() if name not in UNBATCHED], FAMILIES, SAMPLINGS, SIZES),
)
def test_the_text_is_plain_decoding_s(
    drafter: str, family: str, sampling: SamplingParams | None, size: int, tmp_path: Path
) -> None:
    """With drafts verified by ``match``: a draft that is drawn from a q is refused, see below."""
    chosen = None if sampling is None else SamplingParams(temperature=0.8, seed=5, acceptance="match")
    together = Together(family, size)
    for settings in settings_of(drafter, target_of(family), tmp_path):
        found = together.run(settings, lambda engine: engine.generate(PROMPT, NEW, chosen).token_ids)
        assert results(found) == [text_of(family, chosen)] * size, settings


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "size"), each_once(FAMILIES, SIZES))
def test_trees_around_the_truth(family: str, size: int) -> None:
    """Blocks of every length at scattered rows, with equal siblings and probes; some of them another rank's."""
    truth = greedy(family, PROMPT, 50)
    found = Together(family, size).run(
        lambda rank: Oracle([*PROMPT, *truth], 32), lambda engine: engine.generate(PROMPT, 50)
    )
    for out in results(found):
        assert out.token_ids == truth
        assert set(out.stats.acceptance_lengths) >= {1, 2, 3, 4}


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_are_halved_and_one_collective_makes_a_step(sampling: SamplingParams | None) -> None:
    rows: dict[int, list[int]] = {}

    def ask(engine: Engine) -> tuple[Generation, Ranks]:
        assert isinstance(engine.target, ShardedTarget)
        rows[engine.target.ranks.rank] = rows_run(engine.target)
        return engine.generate(PROMPT, NEW, sampling), engine.target.ranks

    found = results(Together("llama", 2).run(WIDE, ask))
    for out, ranks in found:
        assert out.token_ids == text_of("llama", sampling)
        assert ranks.sent == [4 * (2 + 128 + 128)] * out.stats.steps  # checksum, count, a way, a token for each row
        assert ranks.greetings == 1  # at the start of the text
        assert max(out.stats.rows) > 80
    for own in rows.values():
        steps = own[1:]  # the prompt is run by all
        whole = out.stats.rows
        assert len(steps) == len(whole)
        for part, step in zip(steps, whole, strict=True):
            assert part <= (step + 16) / 2 + 5  # half, the part of level 0 that both need, and what another accepted


@pytest.mark.slow
def test_eos_and_budget_inside_a_block() -> None:
    truth = greedy("mistral", PROMPT, NEW)
    together = Together("mistral", 2)
    for at in (0, 3, 4, 9, 17):
        end = truth.index(truth[at])

        def spoil(target: ShardedTarget, rank: int, token: int = truth[at]) -> None:
            target.eos_ids = frozenset([token])

        for steady in (True, False):
            found = together.run(
                lambda rank, steady=steady: Oracle([*PROMPT, *truth], 32, steady=steady),
                lambda engine: engine.generate(PROMPT, NEW),
                spoil=spoil,
            )
            for out in results(found):
                assert out.token_ids == truth[: end + 1]
                assert out.finish_reason == "eos"
    found = together.run(lambda rank: Oracle([*PROMPT, *truth], 32), lambda engine: engine.generate(PROMPT, 11))
    assert [out.token_ids for out in results(found)] == [truth[:11]] * 2


@pytest.mark.slow
def test_several_texts_one_after_the_other_and_processors() -> None:
    processors = [RepetitionPenaltyLogitsProcessor(1.3)]

    def ask(engine: Engine) -> list[list[int]]:
        return [
            engine.generate(prompt_of(size), 20, SAMPLING, logits_processor=processors).token_ids for size in (1, 2, 40)
        ]

    plain = ask(Engine(target_of("llama")))
    assert results(Together("llama", 2).run("lookahead", ask)) == [plain] * 2


def test_rounding_decides_alike_everywhere() -> None:
    """A rank that rounds otherwise now and then never parts from the others."""

    def spoil(target: ShardedTarget, rank: int) -> None:
        own = target._target
        rng, forward = random.Random(rank), own.forward

        def odd(step: StepInput) -> StepOutput:
            output = forward(step)
            if output.logits is not None and rank and rng.random() < 0.15:  # as if all were within rounding
                order = torch.randperm(output.logits.shape[-1], generator=torch.Generator().manual_seed(3))
                output.logits.copy_(output.logits[..., order])
            return output

        own.forward = odd

    found = results(Together("llama", 2).run("lookahead", lambda e: e.generate(PROMPT, NEW).token_ids, spoil=spoil))
    assert found[0] == found[1]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ("lookahead", {"sampling": SamplingParams(acceptance="typical", temperature=1, allow_lossy=True)}, "typical"),
        ("lookahead", {"sampling": SamplingParams(acceptance="reject", temperature=1)}, "reject"),
        (lambda rank: Drawing(torch.full((32, 32), 1 / 32)), {"sampling": SAMPLING}, "probabilities (q)"),
        ("lookahead", {"logits_processor": [type("Own", (LogitsProcessor,), {})()]}, "processor Own may keep a state"),
        ("lookahead", {"logprobs": 2}, "leave out logprobs"),
        ("lookahead", {"prefix_cache": PrefixCache()}, "leave out parallel="),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(drafter: Any, options: dict[str, Any], message: str) -> None:
    for error in Together("llama", 2).run(drafter, lambda engine: engine.generate(PROMPT, NEW, **options)):
        assert isinstance(error, ConfigError)
        assert message in str(error)


def test_batches_are_refused() -> None:
    for error in Together("llama", 2).run("lookahead", lambda engine: engine.generate_batch([PROMPT, PROMPT], NEW)):
        assert isinstance(error, ConfigError)
        assert "one prompt at a time" in str(error)


def test_early_exits_are_refused(tmp_path: Path) -> None:
    settings = settings_of("kangaroo", target_of("llama"), tmp_path)[0]
    together = Together("llama", 2, execution="fused")
    for error in together.run(settings, lambda engine: engine.generate(PROMPT, NEW)):
        assert isinstance(error, ConfigError)
        assert "first layers" in str(error)


def test_hidden_states_of_all_rows_are_refused(tmp_path: Path) -> None:
    for settings in (settings_of(drafter, target_of("llama"), tmp_path)[0] for drafter in ("eagle", "mtp")):
        for error in errors_at_build(settings):
            assert isinstance(error, ConfigError)
            assert "hidden states of all rows" in str(error)


def test_some_layers_alone_are_refused(tmp_path: Path) -> None:
    for settings in settings_of("layer_skip", target_of("llama"), tmp_path):
        for error in errors_at_build(settings):
            assert isinstance(error, ConfigError)
            assert "some of them alone" in str(error)


def errors_at_build(settings: Any) -> list[Any]:
    """What each of two ranks raises where such a drafter is made."""

    def work(ranks: ThreadRanks) -> Any:
        target = ShardedTarget(TransformersTarget(new_model("llama")), ranks=ranks)
        make_drafter(settings, target)

    return run_ranks(2, work)


def errors_of(found: Sequence[Any]) -> list[str]:
    assert all(isinstance(error, ParallelError) for error in found), found
    return [str(error) for error in found]


def test_a_rank_that_drafts_otherwise_ends_all() -> None:
    def drafter(rank: int) -> Drafter:
        return Scripted(lambda context, row_budget: Draft.chain([context.root, 5 + rank * (len(context.tokens) > 10)]))

    found = Together("llama", 3).run(drafter, lambda engine: engine.generate(PROMPT, NEW))
    assert all("rank 1, 2 has not the draft of rank 0" in error for error in errors_of(found))


class Numbers:
    """A tokenizer whose text is the tokens' numbers."""

    all_special_ids = ()

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


_OTHERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "prompt": lambda rank: {"prompt": prompt_of(7, rank)},
    "sampling": lambda rank: {
        "sampling": SamplingParams(temperature=0.8),
        "logits_processor": [RepetitionPenaltyLogitsProcessor(1.1 + rank)],
    },
    "length": lambda rank: {"max_new_tokens": NEW + rank},
    "stops": lambda rank: {"stop": ["7 7 7", "8 8 8"][: 1 + rank]},
    "stop tokens": lambda rank: {"stop_token_ids": [30 + rank]},
    "prediction": lambda rank: {"prediction": [5, 6, 7 + rank]},
    "drafter": lambda rank: {},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("what", _OTHERS)
def test_a_rank_with_another_task_ends_all(what: str) -> None:
    """Before anything of the text is there, so that no rank returns one."""

    def ask(engine: Engine) -> Generation:
        assert isinstance(engine.target, ShardedTarget)
        engine.tokenizer = Numbers()
        arguments = {"prompt": PROMPT, "max_new_tokens": NEW, **_OTHERS[what](engine.target.ranks.rank)}
        try:
            return engine.generate(**arguments)
        finally:
            assert not engine.target.ranks.sent

    found = Together("llama", 2).run(lambda rank: "token_recycling" if rank and what == "drafter" else "lookahead", ask)
    assert all(f"rank 1 has not the {what} of rank 0" in error for error in errors_of(found))


def test_a_rank_with_other_weights_ends_all() -> None:
    together = Together("llama", 2)
    together._models[1] = new_model("llama", seed=7)
    found = together.run("none", lambda engine: engine.generate(PROMPT, NEW))
    assert all("rank 1 continued the same text otherwise" in error for error in errors_of(found))


def test_a_rank_that_fails_in_a_step_ends_all() -> None:
    def spoil(target: ShardedTarget, rank: int) -> None:
        if rank:
            own = target._target
            run, left = own.forward, [5]

            def broken(*given: Any) -> Any:
                output = run(*given)
                left[0] -= output.logits is not None
                if left[0] < 0:
                    output.logits.fill_(torch.nan)
                return output

            own.forward = broken  # type: ignore[method-assign]

    found = Together("llama", 2).run("lookahead", lambda engine: engine.generate(PROMPT, NEW), spoil=spoil)
    assert "rank 1 failed in the middle of a step" in str(found[0])
    assert isinstance(found[1], NumericalError)


@pytest.mark.slow
def test_all_go_by_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's, with as many more rows for the same time; by a clock on which all rows have the time to be measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no other test's curve, which a clock may have cut short
    looks = count()
    monkeypatch.setattr("specdec.parallel.ranks.perf_counter", lambda: 1e-5 * next(looks))

    def ask(engine: Engine) -> Any:
        return engine.with_drafter("lookahead", policy="acceptance").costs

    curves = results(Together("llama", 2).run("none", ask))
    assert curves[0].seconds == curves[1].seconds
    assert curves[0].rows == curves[1].rows
    assert curves[0].rows[:3] == [1, 3, 5]
