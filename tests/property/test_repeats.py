"""A text at a seed is the same alone, in any batch, in any order and after anything, whatever drafts for it.

Under ``reject`` and ``typical`` it depends on the rows proposed, so these must depend on nothing but the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from drafters.draft_model import DraftModel, DraftModelConfig
from specdec import Drafter, Engine, PrefixCache, SamplingParams, TransformersTarget
from specdec.costs.live_curve import LiveCosts
from specdec.drafting.registry import make_drafter
from specdec.native import library as native
from specdec.target import Target
from tests.models import BOS, VOCAB, new_model, settings_of, target_for, target_of
from tests.property.test_engine import Letters
from tests.unit.costs.test_policy import curve_of

Job = tuple[tuple[int, ...], int, SamplingParams]
LIGHT: tuple[Any, ...] = (
    "prompt_lookup",
    "suffix_automaton",
    {"name": "jacobi", "guesses": 1},
    {"name": "jacobi", "guesses": 5},
    "lookahead",
    {"name": "lookahead", "window": 3, "ngram": 3, "guesses": 3, "verify_window": "none", "pool_from_prompt": False},
    {"name": "token_recycling", "from_prompt": False},
    {"name": "token_recycling", "persistent": True},
)


def trees(leaves: Sequence[Any], lonely: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Drafters that merge others, which may merge others themselves; a leaf alone, or one that goes with no other."""

    def merged(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries(
            {
                "name": st.sampled_from(["union", "auto"]),
                "parts": st.lists(parts, min_size=1, max_size=3),
                "memory": st.sampled_from([0.0, 0.5, 0.96]),
                "rows": st.sampled_from([None, None, 3, 9]),
            }
        )

    inner = st.recursive(st.sampled_from(leaves), merged, max_leaves=5)
    return st.one_of(merged(inner), merged(inner), st.sampled_from([*leaves, *lonely]))


prompts = st.integers(1, 40).flatmap(
    lambda size: st.lists(st.integers(BOS + 1, VOCAB - 1), min_size=1, max_size=3).map(lambda some: (some * 40)[:size])
)
"""Of a few tokens again and again, so that there is something to copy."""

samplings = st.builds(
    SamplingParams,
    acceptance=st.sampled_from(["reject", "reject", "typical", "auto", "match"]),
    temperature=st.sampled_from([0.6, 1.0, 1.5]),
    seed=st.integers(0, 99),
    top_k=st.sampled_from([0, 0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    allow_lossy=st.just(True),
)
jobs: st.SearchStrategy[Job] = st.tuples(prompts.map(tuple), st.integers(1, 24), samplings)


class Texts(RuleBasedStateMachine):
    """One engine, which decodes this and that; each text is held against the one of an engine that is new."""

    def __init__(self, target: Target, leaves: Sequence[Any], lonely: Sequence[Any]) -> None:
        super().__init__()
        self.target, self.drafters, self.known = target, trees(leaves, lonely), dict[Any, list[int]]()

    @initialize(
        data=st.data(),
        policy=st.sampled_from(["off", "acceptance"]),
        row=st.sampled_from([1e-9, 0.02, 0.1, 0.3]),
        max_rows=st.sampled_from([3, 16, 40]),
        chunk=st.sampled_from([None, 5]),
        live=st.booleans(),
    )
    def build(self, data: st.DataObject, policy: str, row: float, max_rows: int, chunk: int | None, live: bool) -> None:
        spec, curve = data.draw(self.drafters), curve_of(row=row)

        def engine(drafter: Any = spec) -> Engine:
            sizes: Any = {"max_rows": max_rows, "prefill_chunk": chunk, "policy": policy, "costs": curve}
            made = Engine(self.target, Letters(), drafter, **sizes)
            if live:
                made._follow(LiveCosts(curve))
            return made

        self.new: Callable[[], Engine] = engine
        self.engine = engine()
        self.kept = PrefixCache()

    def check(self, job: Job, found: Sequence[int]) -> None:
        expected = self.known.get(job)
        if expected is None:
            expected = self.known[job] = self.new().generate(*job).token_ids
        assert list(found) == expected

    @rule(job=jobs)
    def alone(self, job: Job) -> None:
        self.check(job, self.engine.generate(*job).token_ids)

    @rule(some=st.lists(jobs, min_size=2, max_size=4), batch=st.integers(2, 4), narrow=st.booleans())
    def batch(self, some: list[Job], batch: int, narrow: bool) -> None:
        asked, budgets, params = zip(*some, strict=True)
        rows = self.engine.max_rows + 3 if narrow else None
        found = self.engine.generate_batch(asked, budgets, params, batch=batch, step_rows=rows)
        for job, one in zip(some, found, strict=True):
            assert one.error is None
            self.check(job, one.token_ids)

    @rule(some=st.lists(jobs, min_size=2, max_size=3))
    def stream(self, some: list[Job]) -> None:
        asked, budgets, params = zip(*some, strict=True)
        found: list[list[int]] = [[] for _ in some]
        for place, chunk in self.engine.stream_batch(asked, budgets, params, batch=2):
            found[place] += chunk.token_ids
        for job, one in zip(some, found, strict=True):
            self.check(job, one)

    @rule(job=jobs, more=st.integers(0, 9))
    def with_a_prefix(self, job: Job, more: int) -> None:
        """Twice, once with a beginning that was decoded before."""
        prompt, new, sampling = job
        text = self.engine.generate(*job, prefix_cache=self.kept).token_ids
        self.check(job, text)
        longer = (*prompt, *text[:more], *prompt[:2]), new, sampling
        self.check(longer, self.engine.generate(*longer, prefix_cache=self.kept).token_ids)

    @rule(job=jobs, steps=st.integers(0, 3))
    def give_up(self, job: Job, steps: int) -> None:
        decoding = self.engine.start(*job)
        with self.target.active():
            decoding.prefill()
            for _ in range(steps):
                if decoding.finish_reason is None:
                    decoding.step()


def run(target: Target, leaves: Sequence[Any], lonely: Sequence[Any], examples: int, steps: int) -> None:
    short = settings(max_examples=examples, stateful_step_count=steps, phases=[Phase.generate])
    machine: Any = partial(Texts, target, leaves, lonely)
    run_state_machine_as_test(machine, settings=short)


SHARING: dict[str, tuple[Any, str]] = {
    "a record of parts": ({"name": "auto", "parts": ["jacobi", "prompt_lookup"], "memory": 0.5}, "off"),
    "a record within another": (
        {"name": "union", "parts": [{"name": "auto", "parts": ["jacobi", "lookahead"]}]},
        "acceptance",
    ),
    "a table": ({"name": "token_recycling", "persistent": True, "from_prompt": False}, "off"),
    "an account by live costs": ("jacobi", "acceptance"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("drafter", "policy"), SHARING.values(), ids=SHARING)
def test_what_sequences_share_changes_no_text(drafter: Any, policy: str) -> None:
    """What other texts left behind, and what forwards took, decides on no row of theirs."""

    def new() -> Engine:
        curve = curve_of(row=0.1)
        made = Engine(target_of("llama"), None, drafter, policy=policy, costs=curve)
        made._follow(LiveCosts(curve))
        return made

    prompts = [[5, 6, 7] * 3, [9, 4] * 6, [3]]
    rules = "reject", "reject", "typical"
    params = [SamplingParams(temperature=1.0, acceptance=rule, seed=2, allow_lossy=True) for rule in rules]
    expected = [new().generate(*job).token_ids for job in zip(prompts, [24] * 3, params, strict=True)]
    engine = new()
    for prompt, own, text in reversed([*zip(prompts, params, expected, strict=True)]):
        assert engine.generate(prompt, 24, own).token_ids == text
    for batch in (2, 3):
        assert [one.token_ids for one in engine.generate_batch(prompts, 24, params, batch=batch)] == expected


def test_texts_repeat() -> None:
    run(target_of("llama"), LIGHT, [], 2, 3)


def made(name: str, target: Target, folder: Path) -> list[Drafter]:
    """The drafters of a name that have weights or a datastore, which sequences only read."""
    (folder / name).mkdir()
    return [make_drafter(own, target) for own in settings_of(name, target, folder / name)]


def heavy(target: Target, folder: Path) -> tuple[list[Any], list[Drafter]]:
    """With those that have weights, one of them of more tokens and one of fewer; and those that go with no others."""
    leaves = list[Any](LIGHT)
    for name in ("medusa", "draft_model", "rest", "suffix_automaton"):
        leaves += made(name, target, folder)
    for size in (VOCAB - 5, VOCAB + 5):
        model = TransformersTarget(new_model("llama", target.dtype, seed=2, vocab_size=size))
        leaves.append(DraftModel(DraftModelConfig(widths=[2], min_confidence=0.0), model))
    return leaves, made("kangaroo", target, folder)


@pytest.mark.slow
def test_texts_repeat_whatever_drafts(tmp_path: Path) -> None:
    target = target_of("llama")
    run(target, *heavy(target, tmp_path), 60, 6)


@pytest.mark.slow
@pytest.mark.skipif(native.library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_repeat_in_native_layers_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = target_for(new_model("qwen3", dtype, **sizes), execution="native")
    run(target, *heavy(target, tmp_path), 30, 6)
