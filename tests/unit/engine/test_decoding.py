"""Learning: a step knows no clock; what is timed around it adds up."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specdec
from drafters.heads.eagle import Eagle
from specdec import Draft, Engine, Observation, PrefixCache, PrefixTree, SamplingParams
from specdec.costs.fallback import Fallback
from specdec.costs.prices import Rest
from specdec.drafter import RestingSession
from specdec.drafting.registry import make_drafter
from specdec.engine import clocks, decoding
from specdec.engine import engine as engines
from specdec.engine import scheduler as batches
from specdec.native import library as native
from specdec.step import device_copies
from tests.fakes import Reciter, Scripted
from tests.models import new_model, prompt_of, settings_of, target_for, target_of
from tests.tiers import each_once
from tests.unit.costs.test_policy import curve_of

PACKAGE = Path(specdec.__file__).parent
TIMELESS = [*sorted((PACKAGE / "step").glob("*.py")), PACKAGE / "engine/sequence.py", PACKAGE / "engine/step.py"]


class Own(Scripted):
    """A session of its own for each sequence, which proposes the root alone and is shown prompts."""

    taps = frozenset({0})

    def __init__(self) -> None:
        super().__init__(lambda context, _: Draft.chain([context.root]))

    def start(self, context: Any) -> Any:
        return Scripted(self.draft).start(context)


@pytest.mark.parametrize("file", TIMELESS, ids=lambda file: file.stem)
def test_a_step_reads_no_clock(file: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name for node in imports for name in (getattr(node, "module", None), *(one.name for one in node.names))}
    assert not names & {"time", "perf_counter", "monotonic", "process_time", "timeit"}
    assert not any(name and name.startswith(("specdec.costs.fallback", "specdec.costs.live_curve")) for name in names)


@pytest.mark.parametrize("batch", [0, 2])
def test_seconds_are_divided_among_what_took_them(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a forward takes 10 and a proposal 1, an observation 2, and 4 for the mask of a step."""
    now, engine = [0.0], Engine(Reciter(lambda text: 50), None, Own())

    def taking(owner: Any, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            now[0] += seconds
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for module in (batches, clocks, decoding, engines):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    taking(engine.target, "forward", 10)
    taking(Scripted, "propose", 1)
    taking(Scripted, "observe", 2)
    taking(decoding, "step", 4)
    found = engine.generate_batch([[1, 2], [3, 4]], 3, batch=batch) if batch else [engine.generate([1, 2], 3)]
    for one in found:
        spent = one.stats.seconds
        assert spent.prefill == (10 + 4) / len(found) + 2
        assert spent.target == 3 * 10 / len(found)
        assert spent.draft == 2 * (1 + 2)  # the last token needs no draft, and nothing is learned of it
        assert spent.rest == 3 * 4 / len(found)
        assert spent.decode == spent.target + spent.draft + spent.rest


class Asleep(Fallback):
    """Rests for long while ``asleep`` says so of the number of calls."""

    def __init__(self, asleep: Any = lambda calls: True) -> None:
        self._asleep, self._calls = asleep, 0

    def rests(self, sequences: int, drawn: bool) -> Rest:
        self._calls += 1
        return Rest.LONG if self._asleep(self._calls) else Rest.NONE

    def note(self, sequences: int, drawn: bool, **step: Any) -> None:
        pass


class Counted(TorchDispatchMode):
    """Counts torch's operations, copies and new tensors among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_calls(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Note the name of each function of the native library that is called."""

    def noted(name: str, function: Any) -> Any:
        return lambda *arguments: (calls.append(name), function(*arguments))[1]

    loaded = native.library()
    for name, function in list(vars(loaded).items()):
        if name.startswith("specdec_"):
            patch.setattr(loaded, name, noted(name, function))


def operations(
    engine: Engine, sampling: SamplingParams | None, forwards: list[Any], *, kept: PrefixCache | None = None
) -> tuple[list[int], list[Any]]:
    """The text, and of its prompt and of each step torch's operations and the library's functions that were called.

    With a prefix cache these are of two texts, of which the second goes on from the first, and how much it copied.
    """
    forward, counts, calls = engine.target.forward, list[Any](), list[str]()

    def noted(step: Any) -> Any:
        wanted = step.wanted
        forwards.append((step.rows, wanted.scored, wanted.top_k, sorted(wanted.hidden)))
        return forward(step)

    with pytest.MonkeyPatch.context() as patch, engine.target.active():
        patch.setattr(engine.target, "forward", noted)
        count_calls(patch, calls)
        tokens = prompt_of(20)
        for more in ((), (5, 6))[: 1 if kept is None else 2]:
            one = engine.start([*tokens, *more], 12, sampling, prefix_cache=kept)
            while one.finish_reason is None:
                calls.clear()
                with Counted() as counted:
                    one.prefill() if one.sequence.prefilling else one.step()
                counts.append((counted.count, *calls))
            counts.append(one.sequence.reused)
            tokens = one.tokens
    return tokens, counts


READERS = ("kangaroo", "medusa", "eagle", "dflash", "mtp", "auto", "union")
"""Drafters that read hidden states."""
RESTED = (*READERS, "token_recycling", "draft_model")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "sampling"), each_once(RESTED, [None, SamplingParams(temperature=0.8, acceptance="match", seed=1)])
)
@pytest.mark.parametrize(("dtype", "execution"), [(torch.float64, "auto"), (torch.float32, "native")])
def test_a_drafter_at_rest_costs_what_none_does(
    drafter: str, sampling: Any, dtype: torch.dtype, execution: str, tmp_path: Path
) -> None:
    """Forwards of as many rows, for as many logits and without hidden states; as many operations and calls of C."""
    model, forwards = new_model("qwen3", dtype), list[Any]()
    target = target_for(model, execution=execution)  # of the library that is loaded now
    plain = operations(Engine(target, None, "none"), sampling, forwards)
    assert any("specdec_run_layers" in calls for calls in plain[1][:-1]) == (execution == "native")
    expected = [*forwards]
    for options in settings_of(drafter, target, tmp_path):
        engine = Engine(target, None, options)
        engine.fallback = Asleep()
        forwards.clear()
        assert operations(engine, sampling, forwards) == plain, options
        assert forwards == expected, options


@pytest.mark.few(2)
@pytest.mark.parametrize("tree", [False, True], ids=["cache", "tree"])
@pytest.mark.parametrize("drafter", READERS)
def test_at_rest_a_kept_text_costs_what_it_costs_without_a_drafter(drafter: str, tree: bool, tmp_path: Path) -> None:
    """Nothing that only a later text's drafter would read is computed, copied or kept, and as much is copied."""
    target, forwards = target_of("qwen3"), list[Any]()

    def empty() -> PrefixCache:
        return PrefixTree(1 << 30) if tree else PrefixCache()

    plain = operations(Engine(target, None, "none"), None, forwards, kept=empty())
    assert [count for count in plain[1] if isinstance(count, int)] == [0, 31]
    expected = [*forwards]
    for options in settings_of(drafter, target, tmp_path):
        engine = Engine(target, None, options)
        engine.fallback = Asleep()
        forwards.clear()
        assert operations(engine, None, forwards, kept=empty()) == plain, options
        assert forwards == expected, options


@pytest.mark.few(2)
@pytest.mark.parametrize("drafter", ["medusa", "kangaroo", "token_recycling", "union"])
def test_on_a_device_a_drafter_at_rest_copies_what_none_does(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of tensors and of their values, from the device and to it."""
    target, copied = target_of("llama"), list[list[int]]()
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    out, to = device_copies.copy_out, device_copies.copy_in

    def read(tensors: Any) -> Any:
        copied.append([tensor.numel() for tensor in tensors])
        return out(tensors)

    def sent(arrays: Any, device: Any) -> Any:
        copied.append([array.size for array in arrays.values()])
        return to(arrays, device)

    monkeypatch.setattr(device_copies, "copy_out", read)
    monkeypatch.setattr(device_copies, "copy_in", sent)
    plain = Engine(target, None, "none").generate(prompt_of(20), 12)
    expected = [*copied]
    assert len(expected) >= 12
    for options in settings_of(drafter, target, tmp_path):
        engine = Engine(target, None, options)
        engine.fallback = Asleep()
        copied.clear()
        assert engine.generate(prompt_of(20), 12).token_ids == plain.token_ids
        assert copied == expected, options


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "drafter",
    [
        "kangaroo",
        "medusa",
        "eagle",
        "mtp",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dflash", "auto", "union")),
    ],
)
def test_after_a_long_rest_it_drafts_again(drafter: str, tmp_path: Path) -> None:
    """From what it sees from then on; the text is plain decoding's, also where the rest began in the prompt."""
    target = target_of("llama")
    text = Engine(target).generate(prompt_of(20), 60).token_ids
    for options in settings_of(drafter, target, tmp_path):
        for asleep in (lambda calls: calls < 25, lambda calls: 2 < calls % 25 < 20):
            engine = Engine(target, None, options, max_rows=24, prefill_chunk=8, costs=curve_of(row=1e-9))
            engine.fallback = Asleep(asleep)
            found = engine.generate(prompt_of(20), 60)
            assert found.token_ids == text, options
            assert max(found.stats.rows[-20:]) > 1, options


@pytest.mark.few(2)
@pytest.mark.parametrize("drafter", READERS)
def test_it_drafts_behind_a_text_that_was_kept_while_it_rested(drafter: str, tmp_path: Path) -> None:
    """Of whose hidden states the first ones are known, or none; the text is plain decoding's."""
    target, prompt = target_of("llama"), prompt_of(20)
    first = Engine(target).generate(prompt, 20).token_ids
    text = Engine(target).generate([*prompt, *first, 5], 24).token_ids
    for options in settings_of(drafter, target, tmp_path):
        for asleep in (lambda calls: True, lambda calls: calls > 5):
            kept, free = PrefixCache(), curve_of(row=1e-9)
            engine = Engine(target, None, options, max_rows=24, prefill_chunk=8, policy="off", costs=free)
            engine.fallback = Asleep(asleep)
            assert engine.generate(prompt, 20, prefix_cache=kept).token_ids == first
            engine.fallback = None
            found = engine.generate([*prompt, *first, 5], 24, prefix_cache=kept)
            assert found.token_ids == text, options
            assert found.stats.reused_tokens == 39
            assert max(found.stats.rows[-12:]) > 1, options


def test_beside_a_prediction_hidden_states_are_not_asked_for_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, asked = target_of("llama"), list[Any]()
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda step: (asked.append(step.wanted.hidden), forward(step))[1])
    engine = Engine(target, None, settings_of("kangaroo", target, tmp_path)[0])
    engine.predicting().fallback = Asleep()
    engine.generate(prompt_of(20), 12, prediction=prompt_of(9))
    assert len(asked) == 13
    assert not any(asked)


class Told(Scripted):
    """A session that can rest. It records the positions whose hidden states it is shown or misses."""

    taps = frozenset({1})

    def __init__(self) -> None:
        super().__init__(lambda context, _: Draft.chain([context.root]))
        self.told: list[str] = []

    def observe(self, seen: Observation) -> None:
        self.told.append(f"{len(seen.taps[1])} seen")

    def missed(self) -> None:
        self.told.append(f"missed up to {self.context.cache.length}")


@pytest.mark.parametrize("tree", [False, True], ids=["cache", "tree"])
def test_of_a_kept_text_it_is_shown_what_is_known_and_told_of_the_rest(tree: bool) -> None:
    """The known beginning is shown, and what ran while it rested is missed, once; what then runs is shown."""
    engine, kept = Engine(target_of("llama"), None, prefill_chunk=8), PrefixTree(1 << 30) if tree else PrefixCache()
    engine.drafter = drafter = Told()
    assert isinstance(drafter, RestingSession)
    engine.fallback = Asleep(lambda calls: calls > 2)  # awake for two chunks of the prompt
    first = engine.generate(prompt := prompt_of(20), 10, prefix_cache=kept)
    assert drafter.told == ["8 seen", "8 seen"]
    for _ in range(2):  # the text that goes on keeps no more of it
        drafter.told.clear()
        engine.fallback = Asleep(lambda calls: False)
        found = engine.generate([*prompt, *first.token_ids, *range(10)], 2, prefix_cache=kept)
        assert drafter.told[:3] == ["8 seen", "8 seen", f"missed up to {found.stats.reused_tokens}"]
        assert drafter.told[3:] == (["8 seen", "2 seen", "1 seen"] if found.stats.reused_tokens == 29 else ["1 seen"])
    assert found.stats.reused_tokens == 39
    engine.fallback, engine.drafter = None, Own()  # whose sessions cannot do without
    assert engine.generate([*prompt, *first.token_ids], 2, prefix_cache=kept).stats.reused_tokens == 0


@pytest.mark.parametrize("drafter", ["medusa", "kangaroo"])
def test_a_text_that_depends_on_drafts_goes_on_from_known_hidden_states_alone(drafter: str, tmp_path: Path) -> None:
    """Under ``reject`` a drafter that sees less draws another text."""
    target, kept = target_of("llama"), PrefixCache()
    sampling = SamplingParams(temperature=0.8, acceptance="reject", seed=1)
    engine = Engine(target, None, settings_of(drafter, target, tmp_path)[0], max_rows=24)
    engine.with_drafter("none").generate(prompt_of(40), 4, prefix_cache=kept)
    found = [engine.generate(prompt_of(40), 30, sampling, prefix_cache=cache) for cache in (kept, None)]
    assert found[0].stats.reused_tokens == 0
    assert found[0].token_ids == found[1].token_ids
    assert found[0].stats.rows == found[1].stats.rows


@pytest.mark.slow
def test_after_a_long_rest_a_head_reads_each_token_beside_its_state(tmp_path: Path) -> None:
    """EAGLE's rows read a state and the token behind it: those before the first draft end in the root."""
    target, read = target_of("llama"), list[list[int]]()
    for options in settings_of("eagle", target, tmp_path):
        drafter = make_drafter(options, target)
        assert isinstance(drafter, Eagle)
        guess = drafter.guess

        def noted(brought: Any, guess: Any = guess) -> Any:
            read.extend(nodes.step.ids.tolist() for nodes in brought)
            return guess(brought)

        with pytest.MonkeyPatch.context() as patch, target.active():
            patch.setattr(drafter, "guess", noted)
            engine = Engine(target, None, drafter, max_rows=24)
            engine.fallback = Asleep(lambda calls: calls % 12 < 6)
            one, drafts = engine.start(prompt_of(20), 60), 0
            one.prefill()
            while one.finish_reason is None:
                read.clear()
                before = [*one.tokens]
                one.step()
                if read and not drafter.at_once:
                    drafts += 1
                    assert read[0] == before[-len(read[0]) :], options
        assert drafts > 5 or drafter.at_once


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["medusa", "kangaroo"])
def test_guesses_after_a_long_rest_are_as_good_as_before(drafter: str, tiny_engine: Engine) -> None:
    """Of the heads that come with the embedded model: what they did not see of the text costs few tokens."""
    prompt = "import os\nimport sys\n\n\ndef main():\n"
    engine = tiny_engine.with_drafter(drafter, policy="off")
    awake = engine.generate(prompt, 120)
    engine.fallback = Asleep(lambda calls: calls < 40)
    rested = engine.generate(prompt, 120)
    assert rested.token_ids == awake.token_ids
    assert set(rested.stats.acceptance_lengths[:38]) == {1}
    after = rested.stats.acceptance_lengths[40:]
    assert sum(after) / len(after) > 0.8 * awake.stats.tokens_per_step


def test_a_session_that_cannot_do_without_is_shown_all() -> None:
    """At rest too: the chunks of the prompt, and each token."""
    engine = Engine(target_of("llama"), None, prefill_chunk=8)
    engine.drafter, engine.fallback = Own(), Asleep()
    one = engine.start(prompt_of(20), 4)
    with engine.target.active():
        one.prefill()
        while one.finish_reason is None:
            one.step()
    session: Any = one.sequence.session
    assert not isinstance(session, RestingSession)
    assert [len(seen.taps[0]) for seen in session.inner.seen] == [8, 8, 3, 1, 1, 1]
