"""Steps that are replayed from graphs, on a device that is not there, against steps that are launched."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Draft, Engine, SamplingParams, TransformersTarget
from specdec.drafting.registry import drafter_names
from specdec.engine import verification
from specdec.engine.prefix_tree import PrefixTree
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.errors import CacheError, SpecdecWarning, TargetError
from specdec.execute.torch import TorchExecutor
from specdec.runners import sent_rows
from specdec.runners.graphs import CudaRecorder
from specdec.step import device_copies
from specdec.step.cache import KVCache
from specdec.step.pages import PagePool
from specdec.step.step_io import Entering, Walk, Wanted
from specdec.target import FINAL
from tests import seam
from tests.launching import Recorder, fused, launch
from tests.models import OF_LAYERS, VOCAB, new_model, prompt_of, reference, settings_of
from tests.tiers import turns

SIZES = {"max_position_embeddings": 2048}
TREE = (-1, 0, 0, 1, 1, 2, 3, 3, 6, 0, 9, 10, 8, 12, 5)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=4)
TEMPERED = SamplingParams(temperature=0.8, seed=4)  # whose draws are a part of the graph
PROMPT, NEW = prompt_of(20), 24


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return launch(monkeypatch)


def on_modules(options: dict[str, Any]) -> Any:
    """A drafter whose text is the same, where a whole forward runs no layers alone."""
    return "none" if options["name"] in OF_LAYERS else options


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def tree(rows: int) -> list[int]:
    return [-1, *((row - 1) // 2 for row in range(1, rows))]


class Both:
    """One model twice: its steps replayed, and launched; every forward is made by both, and compared."""

    def __init__(self, family: str, **sizes: Any) -> None:
        self.targets = [fused(new_model(family, torch.float64, **sizes)) for _ in range(2)]
        self.texts = [seam.text(target, capacity=1500, rows=200) for target in self.targets]

    def forward(self, tokens: Sequence[int], parents: Sequence[int], **options: Any) -> list[Any]:
        draft, outputs = Draft(tokens, parents), []
        for again, target, own in zip((True, False), self.targets, self.texts, strict=True):
            with target.active():
                outputs.append(own.run(draft, again=again, **options))
        return outputs

    def compare(self, outputs: list[Any]) -> None:
        one, other = outputs
        for name in ("logits", "out"):
            assert (getattr(one, name) - getattr(other, name)).abs().max() < 1e-11
        assert one.hidden.keys() == other.hidden.keys()
        assert all((one.hidden[tap] - other.hidden[tap]).abs().max() < 1e-11 for tap in one.hidden)
        first, second = self.texts
        assert first.length == second.length
        for mine, theirs in zip(first.stored(), second.stored(), strict=True):
            assert (mine - theirs).abs().max() < 1e-11

    def commit(self, path: Sequence[int]) -> None:
        for own in self.texts:
            own.commit(path)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_steps_are_those_that_are_launched(family: str, recorder: Recorder) -> None:
    """Chains and trees on both sides of the buckets' borders, after texts on both sides of a window and of a growth."""
    both = Both(family, **SIZES)
    for number in range(9):  # 900 tokens, or 45 windows
        rows = [7] * 100
        both.forward(rows, chain(100), rows=())
        both.commit(range(100))
        for rows, parents in (
            (1, chain(1)),
            (2, chain(2)),
            (3, chain(3)),
            (15, list(TREE)),
            (16, tree(16)),
            (17, tree(17)),
        ):
            if number not in (0, 8) and rows > 2:
                continue
            tokens = [(3 * row + number) % VOCAB for row in range(rows)]
            both.compare(both.forward(tokens, parents, taps={0, 2, FINAL}))
            both.commit([0, 2, 5] if parents == list(TREE) else range(min(rows, 2)))
    grown = [own.grown for own in both.texts]
    while both.texts[0].length < 1100:
        both.forward([5] * 60, chain(60), rows=())
        both.commit(range(60))
    assert ([own.grown for own in both.texts] != grown) == (family != "mistral")
    for rows in (1, 6, 33):
        both.compare(both.forward([9] * rows, tree(rows)))
    assert sorted(set(recorder.made)) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert sum(recorder.replays.values()) > 2 * len(recorder.made)


def test_layers_in_parts(recorder: Recorder) -> None:
    """A first part row by row and siblings beside each other, the rest entered with all; and the taps of each."""
    target = fused(new_model("llama", torch.float64))
    tokens, parents = [3, 4, 5, 6, 7], [-1, 0, 1, 2, 2]
    draft, found = Draft(tokens, parents), []
    for again in (True, False):
        with target.active():
            own = seam.text(target, capacity=60, rows=8).fill(PROMPT, len(PROMPT), again=False)
            early: dict[str, Any] = {"again": again, "exit_layer": 1, "taps": {0, 1}}
            parts = [own.run([tokens[row]], first=row, **early) for row in range(3)]
            parts.append(own.run(tokens[3:], parents, first=3, **early))
            hidden = torch.cat([part.out for part in parts])
            rest = own.run(draft, again=again, entry=Entering(1, hidden), taps={1, 2})
            found.append((parts, rest, own.run(draft, again=again, taps={1, 2})))
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        for tap in (0, 1):
            assert (mine.hidden[tap] - theirs.hidden[tap]).abs().max() < 1e-12
    for mine, theirs in ((found[0][1], found[1][1]), (found[0][2], found[1][2]), (found[0][1], found[0][2])):
        assert (mine.logits - theirs.logits).abs().max() < 1e-12
    assert found[0][1].hidden.keys() == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "sampling"), turns(drafter_names(), [None, SAMPLED, TEMPERED]))
def test_texts_are_those_of_steps_that_are_launched(
    drafter: str, sampling: SamplingParams | None, tmp_path: Path, recorder: Recorder
) -> None:
    plain = TransformersTarget(new_model("mistral", torch.float64))
    target = fused(new_model("mistral", torch.float64))
    loaded = sum(recorder.replays.values())
    for options in settings_of(drafter, plain, tmp_path):
        if drafter in ("kangaroo", "medusa"):
            options = {**options, "check_target": False}  # another object of the same weights
        expected, out = (
            Engine(one, None, own, max_rows=24, prefill_chunk=16).generate(PROMPT, NEW, sampling)
            for one, own in ((plain, on_modules(options)), (target, options))
        )
        assert out.token_ids == expected.token_ids, options
    assert sum(recorder.replays.values()) - loaded >= len(out.steps)


def test_one_graph_does_for_two_engines_and_for_texts_that_alternate(recorder: Recorder) -> None:
    model = new_model("llama", torch.float64)
    target = fused(model)
    engines = [Engine(target), Engine(target)]
    prompts = [prompt_of(size, seed=size) for size in (5, 30)]
    expected = [reference(model, prompt, 12) for prompt in prompts]
    made = None
    decodings = [engine.start(prompt, 12) for engine, prompt in zip(engines, prompts, strict=True)]
    with target.active():
        for decoding in decodings:
            decoding.prefill()
        while any(decoding.finish_reason is None for decoding in decodings):
            for decoding in decodings:
                decoding.step()
            made = len(recorder.made) if made is None else made
    assert [decoding.result().token_ids for decoding in decodings] == expected
    assert len(recorder.made) == made


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "family", "sampling"),
    turns(
        ["none", "token_recycling", "kangaroo", "draft_model"],
        ["llama", "mistral"],
        [None, SAMPLED, TEMPERED],
        first=None,
    ),
)
def test_texts_of_a_batch_are_those_of_each(
    family: str, drafter: str, sampling: SamplingParams | None, tmp_path: Path, recorder: Recorder
) -> None:
    """Prompts of several lengths, of which three are under way, with rows of several numbers."""
    plain = TransformersTarget(new_model(family, torch.float64))
    target = fused(new_model(family, torch.float64))
    prompts = [prompt_of(size, seed=size) for size in (20, 1, 9, 33)]
    for options in settings_of(drafter, plain, tmp_path)[:2]:
        if drafter == "kangaroo":
            options = {**options, "check_target": False}
        expected = [
            Engine(plain, None, on_modules(options), max_rows=12).generate(prompt, 12, sampling) for prompt in prompts
        ]
        recorded = len(recorder.made)
        found = Engine(target, None, options, max_rows=12).generate_batch(prompts, 12, sampling, batch=3)
        assert [one.error for one in found] == [None] * 4
        assert [one.token_ids for one in found] == [one.token_ids for one in expected], options
        assert any(rows % 4 == 0 for rows in recorder.made[recorded:])
    assert any(replays > 3 for replays in recorder.replays.values())


@pytest.mark.few(1)
@pytest.mark.parametrize(("drafter", "mixed"), [("none", True), ("prompt_lookup", False), ("medusa", False)])
def test_the_head_argmax_and_draws_are_in_the_graph(
    drafter: str, mixed: bool, tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy and sampled texts in one batch, at several temperatures. Other processors are behind the graph."""
    plain, target = (TransformersTarget(new_model("llama", torch.float64)), fused(new_model("llama", torch.float64)))
    options = settings_of(drafter, plain, tmp_path)[0]
    if drafter == "medusa":
        options = {**options, "check_target": False}
    sampling = [None, TEMPERED, SamplingParams(temperature=1.7, seed=9), SAMPLED if mixed else TEMPERED]
    prompts = [prompt_of(size, seed=size) for size in (20, 5, 9, 14)]
    both = zip(prompts, sampling, strict=True)
    expected = [Engine(plain, None, options, max_rows=8).generate(prompt, 16, one).token_ids for prompt, one in both]
    engine, inside, drawn = Engine(target, None, options, max_rows=8), list[bool](), list[bool]()
    finish, decide = TorchExecutor._finished, verification.decide

    def behind(own: Any, rows: Any, *rest: Any) -> Any:
        inside.append(not rows.again)
        return finish(own, rows, *rest)

    def decided(sampler: Any, output: Any, depths: Any) -> Any:
        drawn.append(sampler.sample)
        return decide(sampler, output, depths)

    monkeypatch.setattr(TorchExecutor, "_finished", behind)
    monkeypatch.setattr(verification, "decide", decided)
    found = engine.generate_batch(prompts, 16, sampling, batch=4)
    assert [one.error for one in found] == [None] * 4
    assert [one.token_ids for one in found] == expected
    assert all(inside), "the head of no step that is recorded is run behind it"
    assert any(drawn) == mixed


@pytest.mark.few(3)
@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize("drafter", ["token_recycling", "medusa", "kangaroo"])
@pytest.mark.parametrize("sampling", [None, TEMPERED, SAMPLED])
def test_the_walk_and_the_commit_are_in_the_graph(
    sampling: SamplingParams | None,
    drafter: str,
    pages: bool,
    tmp_path: Path,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of trees in a batch whose texts begin, end and are cut in turn. Behind other processors the host does both."""
    plain, target = (TransformersTarget(new_model("llama", torch.float64)), fused(new_model("llama", torch.float64)))
    target.executor.pages = pages
    options = {**settings_of(drafter, plain, tmp_path)[-1]}
    if drafter != "token_recycling":
        options["check_target"] = False
    prompts = [prompt_of(size, seed=size) for size in (50, 1, 9, 61)]
    single = Engine(plain, None, on_modules(options), max_rows=12)
    expected = [single.generate(prompt, 20 + 9 * n, sampling).token_ids for n, prompt in enumerate(prompts)]
    ends = [text[len(text) // 2] for text in expected]  # cut in the midst of what a step accepted
    stopped = [text[: text.index(end) + 1] for text, end in zip(expected, ends, strict=True)]
    by_host, by_graph, walks = list[int](), list[int](), list[int]()
    commit, last_row = KVCache.commit, sent_rows.last_row

    def committed(cache: KVCache, path: Sequence[int]) -> None:
        moved = cache.moved
        if path and path[-1] >= len(path):
            (by_graph if moved else by_host).append(path[-1])
        commit(cache, path)

    monkeypatch.setattr(KVCache, "commit", committed)
    monkeypatch.setattr(sent_rows, "last_row", lambda *arrays: (walks.append(1), last_row(*arrays))[1])
    engine = Engine(target, None, options, max_rows=12)
    found = engine.generate_batch(prompts, [20 + 9 * n for n in range(4)], sampling, batch=3)
    assert [one.token_ids for one in found] == expected
    by_host.clear()  # of steps beside a chunk of a prompt, which are launched
    walks.clear()
    for prompt, end, text in zip(prompts, ends, stopped, strict=True):
        assert engine.generate(prompt, 50, sampling, stop_token_ids=[end]).token_ids == text
    if sampling is SAMPLED:
        assert not by_graph
    else:
        assert not by_host
        assert not walks
        assert by_graph or drafter != "token_recycling"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "family", "sampling"),
    turns(drafter_names(), ["llama", "mistral"], [None, SAMPLED], first=["token_recycling"]),
)
def test_texts_in_pages_are_plain_decoding_s(
    family: str, drafter: str, sampling: SamplingParams | None, tmp_path: Path, recorder: Recorder
) -> None:
    """Texts over a page's end, some with a common beginning, that come and go; at last all pages are given back."""
    plain = TransformersTarget(new_model(family, torch.float64))
    target = fused(new_model(family, torch.float64))
    target.pages = target.executor.pages = True
    prompts = [prompt_of(size, seed=size) for size in (50, 1, 9, 63)]
    prompts += [(*prompt_of(70, seed=1), *prompt_of(size, seed=size)) for size in (3, 20)]
    for options in settings_of(drafter, plain, tmp_path)[:1]:
        if drafter in ("kangaroo", "medusa"):
            options = {**options, "check_target": False}
        engines = [
            Engine(one, None, own, max_rows=12, prefill_chunk=40)
            for one, own in ((plain, on_modules(options)), (target, options))
        ]
        new = [20, 3, 60, 8, 5, 9]
        expected = [engines[0].generate(prompt, count, sampling) for prompt, count in zip(prompts, new, strict=True)]
        kept = PrefixTree(10**7)
        found = engines[1].generate_batch(prompts, new, sampling, batch=3, prefix_cache=kept)
        assert [one.error for one in found] == [None] * 6
        assert [one.token_ids for one in found] == [one.token_ids for one in expected], options
        if family == "llama":
            assert found[5].stats.reused_tokens  # of a text that still runs
        del engines, kept
    gc.collect()
    assert target.describe()["execution"]["cache"] == "in pages of 64 tokens; 0 of 0 in use, 0.0 MB"


@pytest.mark.slow
def test_requests_wait_for_pages(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what all texts may still become, so that none finds no page in its middle; one that is alone does not wait."""
    target = fused(new_model("llama", torch.float64, **SIZES))
    target.pages = target.executor.pages = True
    engine, page = Engine(target, max_rows=4), target.num_layers * 2 * 2 * 64 * 8 * 8
    pages, most = [7], [0]

    def left(device: torch.device) -> int:
        found = pages[0] * page - sum(pool.nbytes for pool in target.executor.pools)
        return int(found / 0.9) + 1

    monkeypatch.setattr(device_copies, "free_bytes", left)
    monkeypatch.setattr("specdec.step.pages._PIECE", 1)
    prompts = [prompt_of(100, seed=seed) for seed in range(4)]  # of 100, 40 and 4 tokens, so 3 pages each
    scheduler = Scheduler(engine, [Request(prompt, 40) for prompt in prompts], batch=4)
    ended, together = 0, 0
    with target.active():
        for events in scheduler.run():
            assert all(event.error is None for event in events)
            ended, together = ended + sum(event.last for event in events), max(together, len(scheduler._running))
            most[0] = max(most[0], sum(pool.used for pool in target.executor.pools))
    assert (ended, together) == (4, 2)
    assert 4 < most[0] <= 6
    pages[0] = 2
    assert len(engine.generate_batch(prompts[:2], 20)[1].token_ids) == 20
    assert target.describe()["execution"]["cache"].startswith("in pages of 64 tokens; ")


def test_a_prompt_for_which_no_page_is_left_ends_alone(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("llama", torch.float64, **SIZES)
    target = fused(model)
    target.pages = target.executor.pages = True
    grow = PagePool._grow

    def limited(pool: PagePool, wanted: int) -> None:
        if pool.pages + wanted > 3:
            raise CacheError("no memory left")
        grow(pool, wanted)

    monkeypatch.setattr("specdec.step.pages._PIECE", 1)
    monkeypatch.setattr(PagePool, "_grow", limited)
    prompts = [prompt_of(10), prompt_of(250), prompt_of(30)]
    with pytest.warns(SpecdecWarning, match=r"1 of 3 prompts failed: 1 \(no memory left"):
        found = Engine(target).generate_batch(prompts, 8)
    assert isinstance(found[1].error, CacheError)
    assert [found[at].token_ids for at in (0, 2)] == [reference(model, prompts[at], 8) for at in (0, 2)]


def test_threads_share_graphs(recorder: Recorder) -> None:
    model = new_model("llama", torch.float64)
    target = fused(model)
    prompts = [prompt_of(size, seed=size) for size in range(5, 9)]
    expected = [reference(model, prompt, 12) for prompt in prompts]
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = Engine(target, drafter="prompt_lookup").generate(prompts[number], 12).token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == expected


def test_rows_that_were_made_before_their_cache_grew_are_run_where_it_is(recorder: Recorder) -> None:
    target = fused(new_model("llama", torch.float64, **SIZES))
    for again in (True, False):
        own = seam.text(target, capacity=1500, rows=8)
        before = own.rows([3], again=again)
        own.blank(0)
        assert own.grown == 1
        with target.active():
            assert torch.equal(target.forward(before).logits, own.run([3], again=again).logits)


def test_rows_that_a_device_has_moved_do_not_enter_again(recorder: Recorder) -> None:
    """Their first layers' keys are elsewhere; from the first layer on they may run once more."""
    target = fused(new_model("llama", torch.float64, **SIZES))
    own, rows = seam.text(target), [3, 5, 4]
    decided = Wanted(walks=(Walk(np.ones(3, dtype=np.bool_), True),))
    with target.active():
        entry = Entering(1, own.run(rows, [-1, 0, 0], exit_layer=1).out)
        step = own.rows(rows, [-1, 0, 0], wanted=decided)
        first = target.forward(step)
        assert step.texts[0].moved
        with pytest.raises(TargetError, match="rows that a step has committed cannot enter it again"):
            target.forward(replace(own.rows(rows, [-1, 0, 0], entry=entry), wanted=step.wanted))
        assert torch.equal(target.forward(step).logits, first.logits)
        own.commit([0])
        assert not step.texts[0].moved


def test_what_is_recorded_beforehand_is_not_recorded_in_a_text(recorder: Recorder) -> None:
    target = fused(new_model("llama", torch.float64))
    target.warm_up(24)
    assert sorted(recorder.made) == [1, 2, 4, 8, 16, 32]
    Engine(target, None, {"name": "token_recycling", "rows": 20}, max_rows=24).generate(PROMPT, NEW)
    assert len(recorder.made) == 6


def test_a_graph_that_cannot_be_recorded_is_done_without(recorder: Recorder) -> None:
    model = new_model("llama", torch.float64)
    target, expected = fused(model), reference(model, PROMPT, 12)
    with target.active():
        seam.text(target).run([3] * 5)
    assert target.executor.graphs() == "one for each bucket of rows, attention by Triton; recorded: 1, of 8 rows"
    assert "attention='flash' gets the text's length" in fused(model, attention="flash").executor.graphs()
    recorder.fails = RuntimeError("operation not permitted when stream is capturing\nmore")
    with pytest.warns(SpecdecWarning, match="no CUDA graph of 1 rows can be recorded: RuntimeError: operation not"):
        assert Engine(target).generate(PROMPT, 12).token_ids == expected
    replays = sum(recorder.replays.values())
    assert Engine(target, drafter="lookahead").generate(PROMPT, 12).token_ids == expected
    assert sum(recorder.replays.values()) == replays
    assert target.executor.graphs().startswith("not used: RuntimeError: operation not permitted")


def test_what_is_not_recorded(recorder: Recorder) -> None:
    """Chunks of a prompt, more rows than a graph pays for, and attention that was asked for by name."""
    model = new_model("llama", torch.float64)
    target = fused(model)
    made, replays = len(recorder.made), sum(recorder.replays.values())
    engine = Engine(target)
    decoding = engine.start(PROMPT, 4)
    with target.active():
        decoding.prefill()
        seam.text(target, capacity=300, rows=200).run([3] * 129)
        texts = [seam.text(target, capacity=80, rows=70) for _ in range(3)]
        seam.run_together(texts, [Draft.chain([3] * 65)] * 3)  # 4 x 128
    named = fused(model, attention="flash")
    assert Engine(named).generate(PROMPT, 4).token_ids == reference(model, PROMPT, 4)
    assert (len(recorder.made), sum(recorder.replays.values())) == (made, replays)


# -- The recorder of a CUDA device, against what torch does there ------------------------------------------------------


class CapturedGraph:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def replay(self) -> None:
        self._driver.done.append("replayed")


class Driver:
    """What torch.cuda does to streams when a graph is captured.

    Attributes:
        done: what was waited for and run, and on which stream.
        ends: whether a capture ends as it should; else torch leaves its stream current.
        states: of the generator of random numbers.
        pools: memory pools so far.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.ends, self.current, self.states, self.pools = True, self.stream("main"), ["begun"], 0
        generator = SimpleNamespace(clone_state=lambda: "anew", graphsafe_set_state=self.states.append)
        parts = {
            "device": lambda device: nullcontext(),
            "graph_pool_handle": self.new_pool,
            "Stream": lambda: self.stream("side"),
            "current_stream": lambda: self.current,
            "current_device": lambda: 1,
            "default_generators": [None, generator],
            "stream": self.on,
            "graph": self.captured,
            "CUDAGraph": lambda: CapturedGraph(self),
        }
        for name, part in parts.items():
            patch.setattr(torch.cuda, name, part)

    def new_pool(self) -> str:
        self.pools += 1
        return f"pool {self.pools}"

    def stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.done.append(f"{name} waits for {other.name}"))

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        former, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = former

    @contextmanager
    def captured(self, graph: Any, pool: str, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == (f"pool {self.pools}", "thread_local")
        former, self.current = self.current, SimpleNamespace(name="capture")
        yield
        if not self.ends:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = former

    def work(self) -> Any:
        assert not gc.isenabled()
        assert not CudaRecorder._one.acquire(blocking=False)  # nobody else waits for the device meanwhile
        self.done.append(f"work on {self.current.name}")
        return "outcome"


WARM = ["side waits for main", "work on side", "work on side", "main waits for side"]


def test_a_graph_is_captured_where_work_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    recorder: Any = CudaRecorder(torch.device("cuda:1"))
    for _ in range(2):
        outcome, replay = recorder.record(driver.work)
        assert outcome == "outcome"
    assert driver.done == 2 * [*WARM, "work on capture"]
    replay()
    assert driver.done[-1] == "replayed"
    assert gc.isenabled()
    assert driver.states == ["begun"]


def test_a_pool_ends_with_its_last_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch fails to record into a pool whose graphs are gone while a tensor of it is held."""
    driver = Driver(monkeypatch)
    recorder: Any = CudaRecorder(torch.device("cuda:1"))
    held = [recorder.record(driver.work)[1] for _ in range(3)]
    del held[:2]
    held.append(recorder.record(driver.work)[1])
    assert driver.pools == 1
    held.clear()
    recorder.record(driver.work)
    assert driver.pools == 2


def test_a_capture_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another stream, nor a generator that takes itself for captured, nor garbage that is not collected."""
    driver = Driver(monkeypatch)
    driver.ends = False
    recorder: Any = CudaRecorder(torch.device("cuda:1"))
    with pytest.raises(RuntimeError, match="during capture"):
        recorder.record(driver.work)
    assert driver.done == [*WARM, "work on capture"]
    assert driver.current.name == "main"
    assert driver.states == ["begun", "anew"]
    assert gc.isenabled()
    assert not CudaRecorder._one.locked()


def test_work_that_fails_before_a_capture_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had launched writes to the cache, as will the kernels that are launched in its place."""
    driver = Driver(monkeypatch)

    def work() -> Any:
        driver.work()
        raise ValueError("no kernel")

    recorder: Any = CudaRecorder(torch.device("cuda:1"))
    with pytest.raises(ValueError, match="no kernel"):
        recorder.record(work)
    assert driver.done == [*WARM[:2], WARM[-1]]
    assert driver.current.name == "main"
