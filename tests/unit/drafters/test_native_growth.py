"""Drafts that the native library grows: token by token, and chance by chance, those that Python grows from passes."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.heads import growing
from drafters.heads.native_growth import Waiting
from specdec import Engine, SamplingParams
from specdec.costs.curve import CostCurve
from specdec.drafter import Context, Observation
from specdec.drafting.registry import make_drafter
from specdec.native import library as native
from specdec.runners.linear import PackedWeight
from specdec.sampling.noise import Noise
from specdec.step.forward_passes import run_all
from specdec.step.tree import Draft
from tests import heads
from tests.models import VOCAB, new_model, prompt_of, target_for
from tests.other_instructions import level
from tests.unit.drafters.test_native_chain import KINDS, SIZE, _wide_heads, target_of

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
__all__ = ["_wide_heads", "level"]

ALWAYS, PAYING = {"min_chance": 0.0}, {}  # a draft of every size, or of what pays
GREEDY = SamplingParams()
SAMPLINGS = {
    "greedy": GREEDY,
    "match": SamplingParams(temperature=1.0, seed=3, acceptance="match"),
    "cool": SamplingParams(temperature=0.7, seed=4, acceptance="match"),
    "typical": SamplingParams(temperature=0.8, seed=5, acceptance="typical", allow_lossy=True),
}
# Rows are nearly free up to some number, and then dear, so that drafts are of many sizes.
COSTS = CostCurve(machine={}, rows=(1, 4, 9, 16), lengths=(1,), seconds=((1.0, 1.02, 1.2, 3.0),))


class Both:
    """A sequence whose drafts two sessions make, of the same head: one in the library, one pass by pass."""

    def __init__(self, drafter: Any, seed: int, sampling: SamplingParams, patch: pytest.MonkeyPatch) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.drafter, self.dtype, self.caught = drafter, drafter.step.dtype, 0
        prompt = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 40))]
        self.context = Context(
            target=drafter.step_target, cache=SimpleNamespace(length=0), tokens=prompt, prompt_length=len(prompt),
            remaining=200, max_rows=24, sampling=sampling, noise=Noise(sampling.seed or 0, VOCAB, torch.device("cpu")),
            rng=self.random, costs=COSTS,
        )  # type: ignore[arg-type]  # fmt: skip
        self.grown = drafter.start(self.context)
        self.level = self.level_by_level(patch)
        self.ran(None, [*range(len(prompt) - 1)], prompt[:-1])

    def level_by_level(self, patch: pytest.MonkeyPatch) -> Any:
        """A session that grows its drafts pass by pass; the other one is seen to do otherwise."""
        with patch.context() as without:
            without.setattr(self.drafter.step.native, "grows", False)
            level = self.drafter.start(self.context)
        assert (self.grown._waits is not None, level._waits) == (True, None)
        return level

    def ran(self, draft: Draft | None, path: Sequence[int], tokens: Sequence[int]) -> None:
        """A step, or a chunk of the prompt, of these rows; sessions see its hidden states."""
        rows = len(path) if draft is None else len(draft)
        if not rows:
            return
        layers = self.drafter.taps
        taps = {layer: torch.randn(rows, SIZE, generator=self.generator).to(self.dtype) for layer in layers}
        self.context.cache.length += len(path)
        for session in (self.grown, self.level):
            session.observe(Observation(draft, path, tokens, None, taps))

    def observe(self, draft: Draft) -> None:
        """Accept a path, nothing of it, or all of it, at random; now and then a step is made without a draft."""
        path = [0]
        while (below := [row for row, parent in enumerate(draft.parents) if parent == path[-1]]) and (
            self.random.random() < 0.7
        ):
            path.append(self.random.choice(below))
        tokens = [*(draft.tokens[row] for row in path[1:]), self.random.randrange(VOCAB)]
        self.context.tokens += tokens
        self.context.remaining -= len(tokens)
        self.ran(draft, path, tokens)
        for _ in range(self.random.choice([0, 0, 0, 1, 12])):  # drafting rests
            self.context.tokens.append(self.random.randrange(VOCAB))
            self.context.remaining -= 1
            self.ran(None, [0], self.context.tokens[-1:])


def drafter_of(kind: str, dtype: torch.dtype, folder: Path, target: Any = None, **options: Any) -> Any:
    folder, target = heads.write(folder, *KINDS[kind]()), target or target_of(dtype)
    found: Any = make_drafter({"name": "eagle", "head": str(folder), "check_target": False, **options}, target)
    found.step_target = target
    assert found.step.native.grows
    return found


def alike(one: Draft, other: Draft) -> None:
    """Both drafts are the same, to the last bit of their chances."""
    assert [*one.tokens] == [*other.tokens]
    assert [*one.parents] == [*other.parents]
    assert one.hints == other.hints


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a small head is dear beside a small model; these cost what a pass of a real one does."""
    monkeypatch.setattr(growing, "pass_price", lambda *_: 0.05)


def compare(
    made: Any, sampling: SamplingParams, patch: pytest.MonkeyPatch, seeds: Sequence[int], kind: type[Both] = Both
) -> None:
    """Drafts of several sequences, each alone and all of them together."""
    several = [kind(made, seed, sampling, patch) for seed in seeds]
    sizes = set()
    for step in range(12):
        budgets = [both.random.choice([1, 2, 5, 9, 24]) for both in several]
        grown: list[Any]
        if step % 2:
            grown = run_all([both.grown.passes(rows) for both, rows in zip(several, budgets, strict=True)])
        else:
            grown = [both.grown.propose(rows) for both, rows in zip(several, budgets, strict=True)]
        for both, rows, draft in zip(several, budgets, grown, strict=True):
            alike(draft, both.level.propose(rows))
            sizes.add((len(draft), max(draft.depths)))
            both.observe(draft)
    assert len(sizes) > 3  # drafts of several sizes and depths


CASES = [
    ("trained", torch.bfloat16, "greedy", ALWAYS),
    ("trained", torch.bfloat16, "match", PAYING),
    ("trained", torch.float32, "cool", {"branch": 1, **ALWAYS}),
    ("trained", torch.float32, "greedy", {"tokens": 9, "rows": 11, "min_chance": 0.05}),
    ("eagle1", torch.bfloat16, "match", {"tokens": 3, **PAYING}),
    ("eagle1", torch.float32, "typical", ALWAYS),
    ("eagle3", torch.bfloat16, "cool", PAYING),
    ("eagle3", torch.float32, "match", {"branch": 2, **ALWAYS}),
    ("from the norm", torch.float32, "greedy", PAYING),
    ("from the norm", torch.bfloat16, "match", {"branch": 40, "tokens": 2, **ALWAYS}),
    ("eagle3.1", torch.float32, "match", PAYING),
    ("window", torch.bfloat16, "greedy", ALWAYS),
    ("window", torch.float32, "match", {"rows": 5, **PAYING}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "dtype", "sampling", "options"), CASES)
def test_drafts_are_those_of_passes(
    kind: str, dtype: torch.dtype, sampling: str, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(drafter_of(kind, dtype, tmp_path, **options), SAMPLINGS[sampling], monkeypatch, [1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, usual = drafter_of("trained", torch.bfloat16, tmp_path, **ALWAYS), torch.get_num_threads()
    both = Both(made, 7, SAMPLINGS["match"], monkeypatch)
    try:
        for _ in range(6):
            torch.set_num_threads(threads)
            grown = both.grown.propose(24)
            torch.set_num_threads(1)
            alike(grown, both.level.propose(24))
            both.observe(grown)
    finally:
        torch.set_num_threads(usual)


def test_what_was_grown_stays_when_more_is_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As answers of other passes do, which can be kept and given again."""
    made, given = drafter_of("trained", torch.float32, tmp_path, **ALWAYS), list[tuple[Any, Any]]()

    def told(grown: Any) -> Any:
        return repr((grown.draft, grown.passes, *map(list, (grown.tokens, grown.first, grown.below, grown.promises))))

    def grow(several: Sequence[Any], own: Any = made.grow) -> Any:
        found = own(several)
        given.extend((one, told(one)) for one in found)
        return found

    monkeypatch.setattr(made, "grow", grow)
    both = Both(made, 2, GREEDY, monkeypatch)
    for _ in range(5):
        both.observe(both.grown.propose(24))
        both.level.propose(24)
    assert len({text for _, text in given}) > 1
    assert [told(one) for one, _ in given] == [text for _, text in given]


def test_states_that_wait_are_copied_together(tmp_path: Path) -> None:
    """Each of them would keep a whole forward's states; in the order in which they came."""
    chain = drafter_of("trained", torch.float32, tmp_path).step.native
    waiting, expected = Waiting(chain), []
    for count in range(30):
        taps = [torch.full((6, SIZE), count + tap / 10) for tap in range(3)]
        taps[0][3] = -count
        waiting.add(taps, [1, 3])
        expected.append(torch.cat([tap[[1, 3]] for tap in taps], -1))
        assert len(waiting._parts) <= 8
        assert len(waiting.addresses()) == 2 * 3 * (count + 1)
    assert torch.equal(waiting.take(), torch.cat(expected))


def test_states_of_another_dtype_are_read_as_the_head_s(tmp_path: Path) -> None:
    chain = drafter_of("trained", torch.bfloat16, tmp_path).step.native
    waiting, taps = Waiting(chain), [torch.randn(4, 2 * SIZE)[:, ::2] for _ in range(3)]
    waiting.add(taps, [0, 2])
    assert torch.equal(waiting.take(), torch.cat([tap[[0, 2]] for tap in taps], -1).bfloat16())


def test_a_head_without_numbers_drafts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = drafter_of("trained", torch.float32, tmp_path, **ALWAYS)
    both = Both(made, 1, GREEDY, monkeypatch)
    both.context.tokens.append(3)
    both.ran(None, [0], [3])
    for session in (both.grown, both.level):
        taps = {layer: torch.full((1, SIZE), float("nan")) for layer in made.taps}
        session.observe(Observation(None, [0], [3], None, taps))
    both.context.tokens.append(3)
    both.context.cache.length += 1
    for session in (both.grown, both.level):
        assert [*session.propose(24).tokens] == [3]


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True])
def test_a_token_without_an_embedding_is_an_error(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft can be asked for again, as nothing of it is kept. A tied embedding is packed, as the head is."""
    target = target_for(new_model("llama", torch.bfloat16, head_dim=16, tie_word_embeddings=tied), execution="native")
    assert isinstance(target.embedding_rows, PackedWeight) == tied
    both = Both(drafter_of("trained", torch.bfloat16, tmp_path, target, **ALWAYS), 1, GREEDY, monkeypatch)
    right, both.context.tokens[-1] = both.context.tokens[-1], VOCAB
    with pytest.raises(IndexError, match="no embedding for one of its tokens"):
        both.grown.propose(24)
    both.context.tokens[-1] = right
    alike(both.grown.propose(24), both.level.propose(24))


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"repetition_penalty": 1.2}, {"acceptance": "reject"}])
def test_other_rules_grow_pass_by_pass(change: Any, tmp_path: Path) -> None:
    made = drafter_of("trained", torch.float32, tmp_path, **ALWAYS)
    params = SamplingParams(**{"temperature": 1.0, "seed": 1, "acceptance": "match", **change})
    session = made.start(SimpleNamespace(
        target=made.step_target, cache=None, prompt_length=3, remaining=9, max_rows=9, sampling=params, costs=COSTS,
        noise=Noise(1, VOCAB, torch.device("cpu")),
    ))  # fmt: skip
    assert session._waits is None


def test_texts_of_a_batch_are_those_without_drafts(tmp_path: Path) -> None:
    target = target_of(torch.bfloat16)
    made = drafter_of("trained", torch.bfloat16, tmp_path, **ALWAYS)
    engine, plain = Engine(target, None, made, max_rows=24), Engine(target)
    for sampling in (GREEDY, SAMPLINGS["match"]):
        prompts = [prompt_of(size) for size in (3, 9, 14)]
        texts = [text.token_ids for text in engine.generate_batch(prompts, 20, sampling)]
        assert texts == [plain.generate(prompt, 20, sampling).token_ids for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trained", "eagle1", "window"])
def test_other_instructions_grow_the_same_drafts(
    level: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As passes do by the same library, which is compiled for processors that have less."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith(("specdec.", "drafters.")) and (
            getattr(module, "library", None) is native.library
        ):
            monkeypatch.setattr(module, "library", lambda: level)
    for dtype in (torch.float32, torch.bfloat16):
        target = target_of.__wrapped__(dtype)
        made = drafter_of(kind, dtype, tmp_path / str(dtype), target, **PAYING)
        for sampling in ("greedy", "match"):
            compare(made, SAMPLINGS[sampling], monkeypatch, [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_drafts_are_those_of_passes(
    kind: str, sampling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = (torch.float32, torch.bfloat16)[([*KINDS].index(kind) + [*SAMPLINGS].index(sampling)) % 2]
    for number, (branch, tokens) in enumerate(itertools.product((1, 3, 8), (1, 4, 7))):
        least = (ALWAYS, PAYING, {"min_chance": 0.1})[(number + number // 3) % 3]
        made = drafter_of(kind, dtype, tmp_path / str(number), branch=branch, tokens=tokens, **least)
        both = Both(made, number, SAMPLINGS[sampling], monkeypatch)
        for _ in range(12):
            alike(draft := both.grown.propose(24), both.level.propose(24))
            both.observe(draft)
