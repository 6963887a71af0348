"""What a step copies between host and device, counted on a CPU that is treated as a device of its own.

The numbers are real, so the same texts show that a step that copies once decides what a step on the host decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from drafters.kangaroo.drafter import Kangaroo
from drafters.kangaroo.worth import Worth
from drafters.shared import vocabulary
from specdec import Context, Draft, DrafterBase, Engine, Observation, SamplingParams
from specdec.costs.curve import roofline
from specdec.drafter import DeviceStep
from specdec.engine import clocks, decoding
from specdec.engine import sequence as sequence_module
from specdec.engine.verification import decide, may_accept, verifying
from specdec.errors import ConfigError, NumericalError
from specdec.results import Step
from specdec.sampling import noise, processors
from specdec.sampling.sampler import Sampler
from specdec.sampling.verify import match
from specdec.step import device_copies, forward_passes
from specdec.step.step_io import StepInput, Walk, Wanted
from specdec.step.step_output import StepOutput
from specdec.target import run_steps
from tests import seam
from tests.fakes import Alternating, Reciter
from tests.launching import fused, launch
from tests.models import VOCAB, new_model, prompt_of, random_adapter, settings_of, target_of
from tests.property.trees import parent_lists
from tests.tiers import each_once, once

READS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "numpy", "cpu", "nonzero", "equal")
MAKES = ("tensor", "as_tensor", "from_numpy", "asarray")
PROMPT, NEW = prompt_of(20), 30
ONCE = ("none", "prompt_lookup", "lookahead", "token_recycling", "medusa", "suffix_automaton", "auto", "union")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=12, seed=4)
RECYCLING = {"name": "token_recycling", "rows": 24, "persistent": True}
PENALTY = {"repetition_penalty": 1.3}  # which looks at each row's own text
SAMPLINGS = [None, SAMPLED, SamplingParams(**PENALTY), SamplingParams(temperature=0.8, seed=4, **PENALTY)]


class Transfers(TorchFunctionMode):
    """Counts what would be a copy: numbers that Python reads, and tensors that are made of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.inside = False  # a copy that was counted as such

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.inside:
            if name in READS:
                self.counts["out"] += 1
            elif name in MAKES or (name == "__getitem__" and _lists(args[1])):
                self.counts["in"] += 1
        return func(*args, **(kwargs or {}))


def _lists(index: Any) -> bool:
    return any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    """While it is there, every device is apart."""
    mode = Transfers()

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            mode.counts[kind] += 1
            mode.inside = True
            try:
                return function(*arguments)
            finally:
                mode.inside = False

        return call

    def forbidden(states: Sequence[Any], size: int, dtype: torch.dtype) -> Any:
        mode.inside = True  # it is given nothing that is on a device
        try:
            return masks(states, size, dtype)
        finally:
            mode.inside = False

    masks = processors.forbidden
    monkeypatch.setattr(processors, "forbidden", forbidden)
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    for reader in (vocabulary, noise):  # the native library reads no device's memory
        monkeypatch.setattr(reader, "chances", lambda *_, **__: None)
    monkeypatch.setattr(device_copies, "copy_in", counted("in", device_copies.copy_in))
    monkeypatch.setattr(device_copies, "copy_out", counted("out", device_copies.copy_out))
    return mode


def steps_of(
    engine: Engine, sampling: SamplingParams | None, mode: Transfers | None, processor: Any = ()
) -> tuple[list[int], list[Any]]:
    """The text, and what each step copied."""
    found: list[Any] = []

    def noted(step: Step) -> None:
        assert mode is not None
        found.append((step, dict(mode.counts)))
        mode.counts.clear()

    if mode is None:
        out = engine.generate(PROMPT, NEW, sampling, logits_processor=processor)
        return out.token_ids, out.steps
    sequence = engine.start(PROMPT, NEW, sampling, logits_processor=processor)
    with mode, engine.target.active():
        sequence.prefill()
        mode.counts.clear()
        while sequence.finish_reason is None:
            noted(sequence.step())
    return sequence.result().token_ids, found


@pytest.mark.few(2)
@pytest.mark.parametrize(("drafter", "sampling"), once(ONCE, SAMPLINGS))
def test_one_copy_in_and_one_out(
    drafter: str, sampling: SamplingParams | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = target_of(("llama", "mistral")[ONCE.index(drafter) % 2])
    # Parts that draft with a model are counted below, and one that asks is among the parts here.
    choices = [options for options in settings_of(drafter, target, tmp_path) if "draft_model" not in str(options)]
    if drafter in ("auto", "union"):
        medusa = settings_of("medusa", target, tmp_path)[0]
        choices.append({"name": drafter, "parts": ["token_recycling", {"name": "union", "parts": [medusa]}]})
    # What drafters learn from one text they know in the next, so that each is made anew.
    # What rows cost is supposed and not measured, as a busy machine could have ``auto`` propose none.
    costs = roofline()
    once, engines = ([Engine(target, None, options, max_rows=24, costs=costs) for options in choices] for _ in range(2))
    expected = [steps_of(engine, sampling, None) for engine in once]
    mode = request.getfixturevalue("transfers")
    accepted = 0
    for engine, (text, drafted) in zip(engines, expected, strict=True):
        got, steps = steps_of(engine, sampling, mode)
        assert got == text
        assert [(step.tokens, step.rows) for step, _ in steps] == [(step.tokens, step.rows) for step in drafted]
        accepted += sum(step.accepted for step, _ in steps)
        assert all(counts == {"in": 1, "out": 1} for _, counts in steps), [c for _, c in steps]
    assert accepted or drafter == "none" or sampling is not None


class Foretold(DrafterBase):
    """Proposes a text that it knows, now and then a wrong token in it, between rows that nobody scores, and asks which
    token will follow.
    """

    name = "foretold"

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.answers = text, list[tuple[Sequence[int] | None, int]]()

    def start(self, context: Context) -> Foretold:
        self.context = context
        return self

    def propose(self, row_budget: int) -> Draft:
        size = len(self.context.tokens)
        first, second = [*self.text[size:], 0, 0][:2]
        rows = [self.context.root, 7, first, 9, second if size % 2 else (second + 1) % VOCAB]
        return Draft(rows, [-1, 0, 0, 2, 2], probes={1, 3}) if row_budget >= len(rows) else Draft(rows[:1], [-1])

    def readback(self, question: DeviceStep) -> torch.Tensor | None:
        return question.root

    def observe(self, seen: Observation) -> None:
        self.answers.append((seen.readback, seen.tokens[-1]))


def test_a_step_tells_the_token_that_follows_it_before_anything_is_copied(transfers: Transfers) -> None:
    target = target_of("llama")
    text = [*PROMPT, *Engine(target).generate(PROMPT, NEW).token_ids]
    drafter = Foretold(text)
    assert Engine(target, None, drafter, max_rows=8).generate(PROMPT, NEW).stats.tokens_per_step >= 2
    assert [answer for answer, _ in drafter.answers] == [[root] for _, root in drafter.answers]


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [2, 5, 64])
@pytest.mark.parametrize("replayed", [False, True])
def test_one_copy_in_for_any_number_of_sequences(
    replayed: bool, count: int, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens, positions, what kernels and verification read, and where a graph has each row; rows are as alone."""
    if replayed:
        launch(monkeypatch)
    target = fused(new_model("llama")) if replayed else target_of("llama")
    drafts = [Draft((3, 4 + at % 5, 5), (-1, 0, 0)) if at % 2 else Draft.chain((at % 7,)) for at in range(count)]
    with target.active():
        texts = [seam.text(target, capacity=20, rows=4) for _ in drafts]
        for at, own in enumerate(texts):
            own.fill([at % 9] * (1 + at % 3), 3, again=False)

        def steps() -> list[StepInput]:
            wanted = Wanted(walks=(Walk(unread=[7]),))
            return [own.rows(draft, wanted=wanted) for draft, own in zip(drafts, texts, strict=True)]

        alone = torch.cat([target.forward(step).out for step in steps()])
        for recorded in range(2):  # what is recorded first is recorded between copies
            transfers.counts.clear()
            with transfers:
                outputs = run_steps(target, steps())
                together = torch.cat([output.out for output in outputs])
                assert all(output.there.sent["unread"].shape == (1,) for output in outputs)
            assert recorded == 0 or transfers.counts["in"] == 1
            assert replayed or transfers.counts["out"] == 0  # what stands in for kernels reads on the host
    assert (together - alone).abs().max() < 1e-11


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    each_once(["none", "token_recycling", "medusa", "kangaroo", "eagle", "mtp"], [None, SAMPLED]),
)
def test_batches_decide_on_the_device_what_each_text_decides_by_itself(
    drafter: str, sampling: SamplingParams | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target, prompts = target_of("mistral"), [prompt_of(size) for size in (20, 7, 13)]
    choices = settings_of(drafter, target, tmp_path)  # the last one has a draft vocabulary, where there is one
    engines = [Engine(target, None, options, max_rows=24) for options in (choices[0], choices[-1])]
    expected = [engines[0].generate(prompt, 12, sampling).token_ids for prompt in prompts]
    mode = request.getfixturevalue("transfers")
    for engine in engines:
        with mode:
            found = engine.generate_batch(prompts, 12, sampling, batch=2)
        assert [one.token_ids for one in found] == expected


@pytest.mark.few(1)
@pytest.mark.parametrize(("drafter", "sampling", "count"), once(ONCE, [None, SAMPLED, "mixed"], [2, 20]))
def test_one_copy_in_and_one_out_for_all_sequences(
    drafter: str, sampling: Any, count: int, tmp_path: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of drafts and of what is read of their rows, however each is sampled."""
    target, prompts = target_of("llama"), [prompt_of(4, seed) for seed in range(count)]
    choices = [options for options in settings_of(drafter, target, tmp_path) if "draft_model" not in str(options)]
    samplings: Any = SAMPLINGS if sampling == "mixed" else [sampling]
    each = [samplings[at % len(samplings)] for at in range(count)]
    engine = Engine(target, None, choices[0], max_rows=24, costs=roofline())
    expected = [engine.generate(prompt, 6, params).token_ids for prompt, params in zip(prompts, each, strict=True)]
    mode, step, counted = request.getfixturevalue("transfers"), decoding.step, []

    def counting(sequences: Any, *arguments: Any, **options: Any) -> Any:
        mode.counts.clear()
        results = step(sequences, *arguments, **options)
        drafted = sum(result.rows is not None and result.rows.draft is not None for result in results)
        if drafted and drafted == len(sequences):  # no prompt is among them, whose end some sessions read
            counted.append((drafted, dict(mode.counts)))
        return results

    monkeypatch.setattr(decoding, "step", counting)
    with mode:
        found = engine.generate_batch(prompts, 6, each, batch=count)
    assert [one.token_ids for one in found] == expected
    assert max(sequences for sequences, _ in counted) > count // 2  # some end before others begin
    assert all(counts == {"in": 1, "out": 1} for _, counts in counted), counted


EOS = [0, 26]
BY_ROW: dict[str, Callable[[], Any]] = {  # of transformers, that read nothing back
    "temperature": lambda: hf.TemperatureLogitsWarper(0.7),
    "top k": lambda: hf.TopKLogitsWarper(5),
    "top p": lambda: hf.TopPLogitsWarper(0.6),
    "min p": lambda: hf.MinPLogitsWarper(0.2),
    "typical": lambda: hf.TypicalLogitsWarper(0.6),
    "epsilon": lambda: hf.EpsilonLogitsWarper(0.03),
    "finite": lambda: hf.InfNanRemoveLogitsProcessor(),
    "normal": lambda: hf.LogitNormalization(),
    "suppressed": lambda: hf.SuppressTokensLogitsProcessor(range(0, VOCAB, 3)),
    "suppressed at first": lambda: hf.SuppressTokensAtBeginLogitsProcessor(range(VOCAB - 1), len(PROMPT) + 2),
    "penalty": lambda: hf.RepetitionPenaltyLogitsProcessor(1.6),
    "penalty for what is new": lambda: hf.RepetitionPenaltyLogitsProcessor(0.01, prompt_ignore_length=len(PROMPT)),
    "n-grams": lambda: hf.NoRepeatNGramLogitsProcessor(2),
    "bias": lambda: hf.SequenceBiasLogitsProcessor([[[one], 2.0] for one in range(3)] + BIASED),
    "bad words": lambda: hf.NoBadWordsLogitsProcessor([[one] for one in range(1, VOCAB, 4)] + [[2, 3]], EOS),
    "length": lambda: hf.MinLengthLogitsProcessor(len(PROMPT) + 9, [*range(0, VOCAB, 2)]),
    "new tokens": lambda: hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [*range(0, VOCAB, 2)]),
    "first": lambda: hf.ForcedBOSTokenLogitsProcessor(5),
    "last": lambda: hf.ForcedEOSTokenLogitsProcessor(len(PROMPT) + 12, EOS),
    "decay": lambda: hf.ExponentialDecayLengthPenalty((2, 1.4), EOS, len(PROMPT)),
}
BIASED = [[[one, (7 * one) % VOCAB], 9.0] for one in range(VOCAB)]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", BY_ROW)
@given(parents=st.just([-1, 0, 1, 0, 3, 0]) | parent_lists(12), data=st.data())
@settings(max_examples=25)
def test_all_rows_at_once_are_the_rows_one_by_one(name: str, parents: list[int], data: st.DataObject) -> None:
    """Bit for bit, whichever rows are scored, and the raw logits stay as they are."""
    text = [
        *PROMPT[:-2],
        *data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6)),
    ]  # up to the prompt's end, or on
    tokens = torch.tensor([text[-1], *data.draw(st.lists(st.integers(0, 4), min_size=11, max_size=11))])[: len(parents)]
    draft = Draft(tokens.tolist(), parents)
    rows = data.draw(
        st.just([*range(len(draft))]) | st.sets(st.sampled_from(range(len(draft))), min_size=1).map(sorted)
    )
    logits = 3 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(parents)))
    sampler = Sampler(SamplingParams(temperature=0.9, top_p=0.95), text, VOCAB, torch.device("cpu"), [BY_ROW[name]()])
    assert sampler.takes_together
    assert not sampler.reads_drafts
    depths = [draft.depths[row] for row in rows]
    wanted = Wanted(np.array(rows), walks=(Walk(unread=()),))
    paths = seam.text(target_of("llama")).sent(draft, wanted=wanted).paths(torch.device("cpu"))
    found = sampler.together(logits, paths, None, depths)
    scores = StepOutput(logits.clone(), rows)
    for own, row in zip(found, rows, strict=True):
        assert torch.equal(own, sampler.processed(scores, row, draft.path_tokens(row)))
    assert torch.equal(logits, scores.logits)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "sampling"), each_once(BY_ROW, [None, SAMPLED]))
def test_processors_of_transformers_copy_nothing(
    name: str, sampling: SamplingParams | None, request: pytest.FixtureRequest
) -> None:
    engine = Engine(target_of("llama"), None, RECYCLING, max_rows=24, policy="off")
    text, _ = steps_of(engine, sampling, None, [BY_ROW[name]()])
    got, steps = steps_of(engine, sampling, request.getfixturevalue("transfers"), [BY_ROW[name]()])
    assert got == text
    assert all(counts == {"in": 1, "out": 1} for _, counts in steps[1:]), [counts for _, counts in steps]


@pytest.mark.slow
def test_processors_change_texts() -> None:
    """Otherwise equality would be cheap; two only keep or norm finite scores, and one is for a text of one token."""
    engine = Engine(target_of("llama"), None, "none")
    drawn = SamplingParams(temperature=2.0, seed=4)
    plain = [engine.generate(PROMPT, NEW, params).token_ids for params in (None, drawn)]
    for name, made in BY_ROW.items():
        found = [engine.generate(PROMPT, NEW, params, logits_processor=[made()]).token_ids for params in (None, drawn)]
        assert (found == plain) == (name in ("finite", "normal", "first")), name


class Watching(hf.NoRepeatNGramLogitsProcessor):
    """What it does depends on what it has been asked."""

    def __init__(self) -> None:
        super().__init__(3)
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.seen += input_ids.tolist()
        scores[:, len(self.seen) % VOCAB] = 50.0
        return super().__call__(input_ids, scores)  # type: ignore[no-any-return]


def test_other_processors_are_asked_as_on_the_host(request: pytest.FixtureRequest) -> None:
    """A subclass, of one that is asked for all rows at once, may keep something between its calls."""
    here, there = Watching(), Watching()
    engine = Engine(target_of("llama"), None, RECYCLING, max_rows=24, policy="off")
    expected = engine.generate(PROMPT, 12, logits_processor=[here]).token_ids
    request.getfixturevalue("transfers")
    assert engine.generate(PROMPT, 12, logits_processor=[there]).token_ids == expected
    assert here.seen == there.seen


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["token_recycling", "draft_model"])
def test_masks_of_a_grammar_are_sent_at_once(
    drafter: str, sampling: SamplingParams | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One copy more into the device; and to know a draft that a model has made there, one out of it before the step."""
    target = target_of("llama")
    drafted = drafter == "draft_model"
    options: Any = RECYCLING
    if drafted:
        options = {**settings_of(drafter, target, tmp_path)[0], "min_confidence": 0.0}
        sampling = None if sampling is None else replace(sampling, acceptance="match")
    engine = Engine(target, None, options, max_rows=24, policy="off")
    text, expected = steps_of(engine, sampling, None, [Alternating()])

    def checked(draft: Draft, *rest: Any) -> Any:
        assert draft.on_device is None
        return verifying(draft, *rest)

    request.getfixturevalue("monkeypatch").setattr(sequence_module, "verifying", checked)
    got, steps = steps_of(engine, sampling, request.getfixturevalue("transfers"), [Alternating()])
    assert got == text
    assert all(token % 2 == place % 2 for place, token in enumerate(text))
    assert not drafted or [step.rows for step, _ in steps] == [step.rows for step in expected]
    assert all(counts["out"] == 1 + (drafted and step.rows > 1) for step, counts in steps), [c for _, c in steps]
    assert all(counts["in"] <= 2 + drafted * step.rows for step, counts in steps), [c for _, c in steps]


def test_a_mask_that_is_none_is_refused(request: pytest.FixtureRequest) -> None:
    class Biased(Alternating):
        def start(self, prompt: Sequence[int]) -> Alternating:
            return self

        def mask(self, scores: torch.Tensor) -> torch.Tensor:
            return super().mask(scores) + 1

    request.getfixturevalue("transfers")
    with pytest.raises(ConfigError, match=r"Biased changed scores of tokens that may follow; it must set"):
        Engine(target_of("llama"), None, "none").generate(PROMPT, 3, logits_processor=[Biased()])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    each_once(["kangaroo", "draft_model"], [*SAMPLINGS, SamplingParams(temperature=0.8, seed=4, acceptance="match")]),
)
def test_models_that_draft_copy_a_bounded_number_of_times(
    drafter: str, sampling: SamplingParams | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One copy in per pass, and one out per guess or level that has to be read, beside the step's own."""
    target = target_of("llama")
    settings = settings_of(drafter, target, tmp_path)
    engines = [Engine(target, None, options, max_rows=24, policy="off") for options in settings]
    expected = [steps_of(engine, sampling, None) for engine in engines]
    mode = request.getfixturevalue("transfers")
    rejects = sampling is not None and sampling.temperature > 0 and sampling.acceptance == "auto"
    penalised = sampling is not None and sampling.repetition_penalty != 1
    for engine, options, (text, drafted) in zip(engines, settings, expected, strict=True):
        got, steps = steps_of(engine, sampling, mode)
        assert got == text
        chain = max(options.get("widths", [1])) == 1
        # Nothing stops it, and if it draws, the one child of each row has a probability.
        stays = not (options["min_confidence"] or (rejects and not chain)) if drafter == "draft_model" else False
        settled = drafter == "kangaroo" and Path(options.get("adapter", "")).name == "kangaroo-attention"  # has no eta
        if not settled and (chain or not stays):  # else no child is dropped for having none
            assert [(step.tokens, step.rows) for step, _ in steps] == [(step.tokens, step.rows) for step in drafted]
        assert not settled or any(step.rows > 2 for step, _ in steps)
        for step, counts in steps:
            if stays or settled:
                reads = 0
            elif drafter == "kangaroo":  # alternatives are read by themselves
                reads = step.rows + ("branch" in options)
            else:
                reads = options.get("tokens", 4)
            assert 1 <= counts["out"] <= reads + 1, (options, step.rows, counts)
            assert counts["in"] <= 2 + step.rows * (1 + penalised), (options, step.rows, counts)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "rule"),
    each_once(["token_recycling", "prompt_lookup", "lookahead", "medusa", "draft_model"], ["typical", "reject"]),
)
def test_rules_that_read_probabilities_copy_them_at_once(
    drafter: str, rule: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The verdict is that of row by row. Medusa reads what it guesses where the host ended the path."""
    target = target_of("llama")
    options = {**settings_of(drafter, target, tmp_path)[0]}
    if drafter == "draft_model":
        options |= {"min_confidence": 0.0, "widths": []}
    engines = [Engine(target, None, options, max_rows=24, policy="off") for _ in range(2)]
    params = [SamplingParams(temperature=0.7, seed=seed, acceptance=rule, allow_lossy=True) for seed in range(4)]
    params[3] = replace(params[3], repetition_penalty=1.3, top_k=20)
    expected = [steps_of(engines[0], one, None) for one in params]
    mode = request.getfixturevalue("transfers")
    for one, (text, drafted) in zip(params, expected, strict=True):
        got, steps = steps_of(engines[1], one, mode)
        assert got == text
        assert [(step.tokens, step.rows) for step, _ in steps] == [(step.tokens, step.rows) for step in drafted]
        assert {counts["out"] for _, counts in steps} <= {1, 1 + (drafter == "medusa")}, [c for _, c in steps]
    assert any(step.accepted for _, drafted in expected for step in drafted)


SETTLED = [
    *SAMPLINGS,
    SamplingParams(temperature=0.8, seed=4, acceptance="reject"),
    SamplingParams(temperature=0.8, seed=4, acceptance="reject", **PENALTY),
    SamplingParams(temperature=0.7, seed=1, acceptance="typical", allow_lossy=True),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("sampling", "draft_vocab"), each_once(SETTLED, [0, VOCAB // 2]))
def test_a_round_that_nothing_stops_stays_on_the_device(
    sampling: SamplingParams | None, draft_vocab: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With as many guesses it is the round that is read: the same texts and rows, whatever judges them. A copy in for
    each pass, but for an adapter's first one where it asks for nothing there, and, where processors read the text, one
    for that."""
    target, patch = target_of("llama"), request.getfixturevalue("monkeypatch")
    random_adapter(target, tmp_path, eta=None, draft_vocab=draft_vocab, gamma=3, seed=1)
    options = {"name": "kangaroo", "adapter": str(tmp_path), "branch": 1}
    text, drafted = steps_of(Engine(target, None, {**options, "eta": 0.0}, policy="off"), sampling, None)
    engine = Engine(target, None, options, policy="off")
    patch.setattr(Worth, "_paying", lambda own, hopes, rows: 1)
    patch.setattr(Worth, "_onward", lambda own, hopes, rows: [1.0])
    got, steps = steps_of(engine, sampling, request.getfixturevalue("transfers"))
    assert got == text
    assert [(step.tokens, step.rows) for step, _ in steps] == [(step.tokens, step.rows) for step in drafted]
    assert any(step.rows == 4 for step in drafted)
    more = sampling is not None and sampling.repetition_penalty != 1
    for step, counts in steps:
        most = 1 + (step.rows > 1) * (step.rows + more)
        assert counts in [{"in": copies, "out": 1} for copies in {most, max(1, most - 1)}], (step.rows, counts)


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, *SETTLED[1:2], *SETTLED[4:5]])
def test_the_passes_of_a_head_copy_in_once_and_read_nothing(
    sampling: SamplingParams | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Of heads of every kind, chains and trees, greedy, matched and drawn."""
    target, patch = target_of("llama"), request.getfixturevalue("monkeypatch")
    plain = Engine(target).generate(PROMPT, NEW, sampling).token_ids
    settled = [options for options in settings_of("eagle", target, tmp_path) if not options.get("min_chance")]
    several = settings_of("mtp", target, tmp_path)  # of which two have one layer
    settled += [several[0], several[2]]
    blocks = settings_of("dflash", target, tmp_path)
    settled += [blocks[0], *blocks[3:]]  # whose layers have no window: its mask is one copy more
    assert len(settled) == 9
    mode, run_together, passes, most = request.getfixturevalue("transfers"), forward_passes.run_together, [0], 0

    def counted(waiting: Sequence[Any]) -> Any:
        passes[0] += len(waiting)
        return run_together(waiting)

    patch.setattr(forward_passes, "run_together", counted)
    for options in settled:
        engine = Engine(target, None, options, max_rows=24, policy="off")
        got, steps = steps_of(engine, sampling, mode)
        assert got == plain or (sampling is not None and sampling.acceptance == "reject")
        most = max(most, *(counts["in"] for _, counts in steps))
        assert all(counts["out"] == 1 for _, counts in steps), [counts for _, counts in steps]
        assert sum(counts["in"] for _, counts in steps) == len(steps) + passes[0]
        passes[0] = 0
    assert most > 4


def test_where_a_head_s_chances_are_compared_its_levels_are_read(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = target_of("llama")
    options = next(options for options in settings_of("eagle", target, tmp_path) if options.get("min_chance"))
    cases = ((None, options), (SamplingParams(**PENALTY), {**options, "min_chance": 0.0}))
    made = [[Engine(target, None, chosen, max_rows=24, policy="off") for _, chosen in cases] for _ in range(2)]
    expected = [steps_of(engine, sampling, None) for engine, (sampling, _) in zip(made[0], cases, strict=True)]
    mode = request.getfixturevalue("transfers")
    for engine, (sampling, _), (text, drafted) in zip(made[1], cases, expected, strict=True):
        got, steps = steps_of(engine, sampling, mode)
        assert got == text
        assert [step.rows for step, _ in steps] == [step.rows for step in drafted]
        assert max(counts["out"] for _, counts in steps) > 2


@pytest.mark.parametrize("acceptance", ["match", "reject"])
def test_what_is_no_number_is_drafted_unread(
    acceptance: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an adapter's weights are so large that it says NaN, the text is the target's; drawn, its q is one."""
    target, sampling = target_of("llama"), SamplingParams(temperature=0.8, seed=4, acceptance=acceptance)
    random_adapter(target, tmp_path, eta=None)
    monkeypatch.setattr(Kangaroo, "guess", lambda own, brought: [torch.full((1, VOCAB), torch.nan) for _ in brought])
    request.getfixturevalue("transfers")
    engine = Engine(target, None, {"name": "kangaroo", "adapter": str(tmp_path)}, policy="off")
    found = engine.generate(PROMPT, NEW, sampling)
    assert max(found.stats.rows) > 1
    assert (
        acceptance == "reject"
        or found.token_ids == Engine(target, None, "none").generate(PROMPT, NEW, sampling).token_ids
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_a_guess_is_read_while_its_pass_runs(
    sampling: SamplingParams | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the device is never without work in a round that an eta may end."""
    target, done = target_of("llama"), list[str]()
    random_adapter(target, tmp_path, eta=0.04, gamma=3)
    options = {"name": "kangaroo", "adapter": str(tmp_path)}
    expected = Engine(target, None, options, policy="off").generate(PROMPT, NEW, sampling)
    forward = target.forward

    def reading(tensor: torch.Tensor) -> Callable[[], list[float]]:
        done.append("guessed")

        def numbers() -> list[float]:
            done.append("read")
            return tensor.tolist()  # type: ignore[no-any-return]

        return numbers

    def noted(step: StepInput) -> Any:
        done.append("verified" if step.entering is not None else "run")
        return forward(step)

    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    monkeypatch.setattr(device_copies, "reading", reading)
    monkeypatch.setattr(target, "forward", noted)
    found = Engine(target, None, options, policy="off").generate(PROMPT, NEW, sampling)
    assert (found.token_ids, found.stats.rows) == (expected.token_ids, expected.stats.rows)
    rounds = [one.split() for one in " ".join(done).split("verified")][1:-2]  # all but the prompt's and the last
    guesses = [one.count("read") for one in rounds]
    assert rounds == [["run", *["guessed", "run", "read"] * count] for count in guesses]
    assert [count + 1 for count in guesses] == found.stats.rows[1 : 1 + len(guesses)]
    assert len(guesses) > 5


def test_prefill_lasts_until_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that does nothing before somebody waits, and takes a second per row; nothing else takes time."""
    target = target_of("llama")
    engine = Engine(target, None, "none", prefill_chunk=8)
    forward, left, now = target.forward, [0], [0.0]

    def launched(step: StepInput) -> Any:
        left[0] += step.rows
        return forward(step)

    def wait(device: torch.device) -> None:
        now[0] += left[0]
        left[0] = 0

    monkeypatch.setattr(target, "forward", launched)
    monkeypatch.setattr(device_copies, "wait", wait)
    for module in (clocks, decoding):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    begun = engine.start(PROMPT, NEW)
    begun.stats.seconds.prefill = 0.0  # without what it took to begin
    with target.active():
        begun.prefill()
    assert (begun.stats.seconds.prefill, left) == (len(PROMPT) - 1, [0])


def test_tokens_that_come_later_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = list[int]()
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> list[int]:
        copied.append(1)
        return tolist(tensor)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    draft, told = (Draft((), (-1, 0, 0), on_device=torch.tensor([5, 6, 7])) for _ in range(2))
    assert (len(draft), draft.depths, copied) == (3, [0, 1, 1], [])
    assert draft.on_host() is draft.on_host() is draft
    assert (draft.tokens, draft.on_device, copied) == ([5, 6, 7], None, [1])
    assert (told.on_host([5, 6, 7]).tokens, told.on_device, copied) == ([5, 6, 7], None, [1])


def walked(draft: Draft, logits: torch.Tensor) -> None:
    """Assert that the device's walk of a draft is the host's; ``logits``: of each row."""
    rows = draft.scored_rows()
    scores = StepOutput(logits if rows is None else logits[rows], rows)
    sampler = Sampler(SamplingParams(), [1], 3, torch.device("cpu"))
    accept, alone = may_accept(draft, sampler, walks=True)
    assert alone
    verdict, asked = match(draft, scores, sampler), None if rows is None else np.array(rows)
    for decides in (True, False):
        wanted = Wanted(asked, walks=(Walk(accept, decides),))
        sent = seam.text(target_of("llama")).sent(draft, wanted=wanted)
        assert sent.walk(scores.argmax_there).tolist() == [verdict.path[-1], len(verdict.path) - 1, verdict.tokens[-1]]


@given(parents=parent_lists(12), data=st.data())
@settings(max_examples=60)
def test_the_device_walks_as_the_host_does(parents: list[int], data: st.DataObject) -> None:
    """Few tokens, so that siblings are equal and paths get long; some rows are probes, some of them read."""
    size = len(parents)
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    probes = frozenset(data.draw(st.sets(st.integers(1, size)))) & frozenset(range(1, size))
    read = sorted(data.draw(st.sets(st.sampled_from(sorted(probes))))) if probes else []
    logits = torch.tensor(data.draw(st.lists(st.permutations([0.0, 1.0, 2.0]), min_size=size, max_size=size)))
    walked(Draft(tokens, parents, probes=probes, read=read), logits)


def test_the_device_goes_on_from_the_first_of_equal_siblings() -> None:
    """Though more of what is behind the second one is right."""
    walked(Draft([0, 1, 1, 2], [-1, 0, 0, 2]), torch.eye(3)[[1, 0, 2, 0]])


def test_arrays_arrive_as_they_were() -> None:
    arrays = {
        "a": np.arange(3),
        "b": np.array([[True, False]]),
        "c": np.zeros((0, 2), dtype=np.int64),
        "d": np.eye(5) > 0,
    }
    found = device_copies.copy_in(arrays, torch.device("cpu"))
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert np.array_equal(found[name].numpy(), array)
    assert device_copies.copy_out([torch.tensor([[1, 2]]), torch.tensor([True])]) == [[1, 2], [1]]
    numbers = torch.tensor([[-0.1, torch.inf]])
    found = device_copies.copy_out([numbers, torch.tensor([1 << 62]), numbers.double() / 3])
    assert found == [numbers[0].tolist(), [1 << 62], (numbers.double() / 3)[0].tolist()]


def test_a_number_that_is_none_is_refused(request: pytest.FixtureRequest) -> None:
    target = target_of("llama")
    request.getfixturevalue("transfers")
    for sampling in (SamplingParams(), SAMPLED):
        sampler = Sampler(sampling, [1, 2], 3, target.device)
        scores = StepOutput(torch.tensor([[0.0, torch.nan, 1.0], [1.0, 2.0, 3.0]]))
        scores.processed = sampler.together(scores.given, torch.empty(0))
        scores.own = decide(sampler, scores, [0, 1]).tolist()
        assert sampler.token(scores, 1, [0]) in (0, 1, 2)
        with pytest.raises(NumericalError, match="logits are no distribution"):
            sampler.token(scores, 0, [])


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_log_probabilities_are_those_of_the_host(drafter: str, request: pytest.FixtureRequest) -> None:
    """Greedily nothing else reads the scores of a step of one row."""
    prompts = [prompt_of(20, seed) for seed in range(3)]
    engine = Engine(Reciter(lambda text: (text[-1] * 7 + len(text) // 9) % VOCAB), None, drafter, max_rows=8)
    expected = [one.logprobs for one in engine.generate_batch(prompts, 12, logprobs=2, batch=3)]
    request.getfixturevalue("transfers")
    assert [one.logprobs for one in engine.generate_batch(prompts, 12, logprobs=2, batch=3)] == expected
    assert engine.generate(prompts[0], 12, logprobs=2).logprobs == expected[0]
