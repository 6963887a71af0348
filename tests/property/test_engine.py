"""The engine, fuzzed: any draft, end, error and interleaving, against decoding one token at a time without specdec."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specdec import Context, Draft, DrafterBase, Engine, Observation, SamplingParams
from specdec.engine.decoding import Decoding
from specdec.sampling.noise import Noise
from tests.models import VOCAB, model_of, prompt_of, target_of

TEMPERATURE = 0.8
FAMILIES = ("llama", "mistral", "gemma3")  # full attention, windows of 8 everywhere, and in two layers of three

SIZES = (1, 3, 11)  # of prompts


class Broken(Exception):
    """What a drafter, a processor or a callback raises here."""


def weigh(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that depends on the whole text."""
    total = int(ids.sum())
    scores[:, total % VOCAB] = -torch.inf
    scores[:, (7 * total + ids.shape[1]) % VOCAB] += 2.0
    return scores


@lru_cache(maxsize=100_000)
@torch.inference_mode()
def next_token(family: str, text: tuple[int, ...], seed: int | None, weighed: bool) -> int:
    """The token after a text, by the model's own forward over all of it."""
    ids = torch.tensor([text])
    logits = model_of(family)(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, -1]
    if weighed:
        logits = weigh(ids, logits.clone())
    if seed is None:
        return int(logits.argmax())
    noise = Noise(seed, VOCAB, torch.device("cpu")).gumbel(len(text))
    return int((logits[0] / TEMPERATURE + noise).argmax())


class Letters:
    """A tokenizer of one letter per token."""

    all_special_ids: Sequence[int] = ()

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


@dataclass(frozen=True)
class Row:
    """One row of a draft to be: a place among the rows before it, and what it holds."""

    parent: int
    right: bool
    token: int
    probe: bool


rows = st.builds(
    Row,
    parent=st.integers(0, 8),
    right=st.booleans() | st.just(True),
    token=st.integers(0, VOCAB - 1),
    probe=st.integers(0, 5).map(lambda n: n == 0),
)


class Planned(DrafterBase):
    """Its sessions propose what they are told to, or raise."""

    name = "planned"

    def __init__(self) -> None:
        self.sessions: list[PlannedSession] = []

    def start(self, context: Context) -> PlannedSession:
        self.sessions.append(PlannedSession(context))
        return self.sessions[-1]


class PlannedSession:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.plan: Sequence[Row] = ()
        self.text: Sequence[int] = ()  # that it has to be
        self.fails = ""

    def propose(self, row_budget: int) -> Draft:
        if self.fails == "propose":
            raise Broken
        known = len(self.context.tokens)
        tokens, parents, depths, true = [self.context.root], [-1], [0], [True]
        probes = set[int]()
        for row in self.plan[: row_budget - 1]:
            parent = max(0, len(tokens) - 1 - row.parent)  # 0 is a chain
            place = known + depths[parent]
            right = true[parent] and place < len(self.text)
            token = self.text[place] if row.right and right else row.token
            if row.probe or parent in probes:
                probes.add(len(tokens))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            true.append(right and token == self.text[place])
        return Draft(tokens, parents, probes=frozenset(probes))

    def observe(self, seen: Observation) -> None:
        assert self.context.cache.length == len(self.context.tokens) - 1
        if self.fails == "observe":
            raise Broken


@dataclass
class Running:
    """A generation under way, and the text that it has to be."""

    decoding: Decoding
    session: PlannedSession
    expected: list[int]
    reason: str
    faults: list[str]


class Generations(RuleBasedStateMachine):
    """Generations of one engine, a step of this one and a step of that one."""

    @initialize(
        family=st.sampled_from(FAMILIES),
        max_rows=st.integers(1, 12),
        chunk=st.none() | st.integers(1, 9),
        context=st.integers(12, 64),
    )
    def build(self, family: str, max_rows: int, chunk: int | None, context: int) -> None:
        self.family, self.context = family, context
        self.target = copy.copy(target_of(family))
        self.target.context_length = context
        self.drafter = Planned()
        self.engine = Engine(self.target, Letters(), self.drafter, max_rows=max_rows, prefill_chunk=chunk)
        self.running: list[Running] = []

    def expected(
        self, prompt: Sequence[int], new: int, seed: int | None, weighed: bool, eos: frozenset[int], modulus: int
    ) -> tuple[list[int], str]:
        """The text with its prompt, and why it ends."""
        tokens, end = list(prompt), min(len(prompt) + new, self.context)
        while True:
            tokens.append(next_token(self.family, tuple(tokens), seed, weighed))
            if tokens[-1] in eos:
                return tokens, "eos"
            if modulus and sum(tokens) % modulus == 0:
                return tokens, "stop"
            if len(tokens) == end:
                return tokens, "length" if end == len(prompt) + new else "context"

    @rule(
        size=st.sampled_from(SIZES),
        new=st.integers(1, 40),
        seed=st.sampled_from([None, 0, 1]),
        weighed=st.booleans(),
        eos=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        modulus=st.sampled_from([0, 0, 19]),
    )
    @precondition(lambda self: len(self.running) < 4)
    def start(self, size: int, new: int, seed: int | None, weighed: bool, eos: frozenset[int], modulus: int) -> None:
        prompt, faults = prompt_of(size), list[str]()

        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if faults:
                raise Broken
            return weigh(ids, scores)

        expected, reason = self.expected(prompt, new, seed, weighed, eos, modulus)
        decoding = self.engine.start(
            prompt,
            new,
            None if seed is None else SamplingParams(temperature=TEMPERATURE, seed=seed),
            logits_processor=[processor] if weighed else [],
            stop_when=(lambda tokens: sum(tokens) % modulus == 0) if modulus else None,
            eos_ids=eos,
        )
        session = self.drafter.sessions[-1]
        session.text = expected
        with self.target.active():
            decoding.prefill()
        self.running.append(Running(decoding, session, expected, reason, faults))

    @rule(data=st.data(), plan=st.lists(rows, max_size=14), times=st.integers(1, 4))
    @precondition(lambda self: self.running)
    def step(self, data: st.DataObject, plan: list[Row], times: int) -> None:
        one = data.draw(st.sampled_from(self.running))
        one.session.plan = plan
        for _ in range(times):
            if one.decoding.finish_reason is None:
                with self.target.active():
                    one.decoding.step()
            self.check(one)
        if one.decoding.finish_reason is not None:
            self.running.remove(one)

    def check(self, one: Running) -> None:
        decoding, tokens = one.decoding, one.decoding.tokens
        if decoding.finish_reason is None:
            assert tokens == one.expected[: len(tokens)]
            assert len(tokens) < len(one.expected)
        else:
            assert (tokens, decoding.finish_reason) == (one.expected, one.reason)
            new = tokens[decoding.stats.prompt_tokens :]
            assert decoding.result().token_ids == new
            assert sum(decoding.stats.acceptance_lengths) == len(new)

    @rule(data=st.data(), plan=st.lists(rows, max_size=14), place=st.sampled_from(["propose", "processor", "observe"]))
    @precondition(lambda self: self.running)
    def break_down(self, data: st.DataObject, plan: list[Row], place: str) -> None:
        """An error before the commit leaves a generation as it was; after one in ``observe`` it is given up."""
        one = data.draw(st.sampled_from(self.running))
        one.session.plan, before = plan, list(one.decoding.tokens)
        one.session.fails = place
        one.faults += ["broken"] * (place == "processor")
        try:
            with self.target.active():
                one.decoding.step()
        except Broken:
            if place == "observe":
                self.running.remove(one)
            else:
                assert one.decoding.tokens == before
                assert one.decoding.finish_reason is None
        else:
            self.check(one)
            if one.decoding.finish_reason is not None:
                self.running.remove(one)
        one.session.fails = ""
        one.faults.clear()

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def give_up(self, data: st.DataObject) -> None:
        self.running.remove(data.draw(st.sampled_from(self.running)))

    @rule(size=st.sampled_from(SIZES), new=st.integers(1, 24), steps=st.integers(0, 8))
    def callback_fails(self, size: int, new: int, steps: int) -> None:
        """At once the same prompt again, whole."""
        expected, reason = self.expected(prompt_of(size), new, None, False, frozenset(), 0)

        def on_step(step: Any) -> None:
            if step.index == steps:
                raise Broken

        if len(expected) - size > steps:  # a step is one token here: the session has no plan
            with pytest.raises(Broken):
                self.engine.generate(prompt_of(size), new, on_step=on_step)
        out = self.engine.generate(prompt_of(size), new)
        assert (out.token_ids, out.finish_reason) == (expected[size:], reason)

    @rule(size=st.sampled_from(SIZES), new=st.integers(1, 24), chunks=st.integers(0, 30), at=st.integers(0, 23))
    def stream_and_close(self, size: int, new: int, chunks: int, at: int) -> None:
        """A stream with a stop string of the text itself, closed after some chunks."""
        prompt = prompt_of(size)
        expected, _ = self.expected(prompt, new, None, False, frozenset(), 0)
        text = Letters().decode(expected[size:])
        stop = text[at : at + 2]
        cut = text.find(stop) if len(stop) == 2 else len(text)
        stream: Any = self.engine.stream(prompt, new, stop=[stop] if len(stop) == 2 else [])
        seen, reason = "", None
        for _, chunk in zip(range(chunks), stream, strict=False):
            seen, reason = seen + chunk.text, chunk.finish_reason
        stream.close()
        assert text[:cut].startswith(seen)
        assert reason is None or seen == text[:cut]

    @invariant()
    def states_agree(self) -> None:
        for one in getattr(self, "running", ()):
            assert one.decoding.sequence.context.cache.length == len(one.decoding.tokens) - 1
        if hasattr(self, "target"):
            assert self.target.model.config._attn_implementation != "specdec"


@pytest.mark.slow
def test_the_engine_against_one_token_at_a_time() -> None:
    """A failure is not shrunk here, which would take minutes, but in the test below."""
    short = settings(max_examples=12, stateful_step_count=25, phases=[Phase.generate])
    run_state_machine_as_test(Generations, settings=short)


@pytest.mark.slow
def test_the_engine_at_length() -> None:
    run_state_machine_as_test(Generations, settings=settings(max_examples=30, stateful_step_count=50))
