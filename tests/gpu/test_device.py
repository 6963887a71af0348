"""On a CUDA device: the same promises as on a CPU, with the device's own kernels."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

from specdec import Draft, Engine, SamplingParams, TransformersTarget
from specdec.bench.shapes import random_model, random_prompt
from specdec.drafting.registry import drafter_names, make_drafter
from specdec.models.described_target import DescribedTarget
from specdec.runners import ATTENTIONS, cuts
from specdec.runners.attention import attend
from specdec.runners.graphs import CudaRecorder
from specdec.sampling.noise import Noise, inverse_bits
from specdec.step import device_copies
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.step_output import finite_argmax
from specdec.step.tree import ancestors
from tests import seam
from tests.fakes import Alternating
from tests.launching import fused
from tests.models import OF_LAYERS, new_model, prompt_of, reference, settings_of

products = pytest.importorskip("specdec.runners.kernels.product")
pick = pytest.importorskip("specdec.runners.kernels.pick")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
BACKENDS = [name for name in ATTENTIONS if name != "flash" or importlib.util.find_spec("flash_attn") is not None]
FAMILIES = ("llama", "mistral", "gemma2")
PROMPTS = (prompt_of(1), prompt_of(40))
NEW = 50


@cache
@cache
def model_of(family: str) -> Any:
    return new_model(family, torch.float32).to(DEVICE)


@cache
def target_of(family: str, execution: str = "modules") -> Any:
    """``auto``: a copy of its weights, by Triton's kernels where they compute the family, else by torch."""
    model = model_of(family)
    return TransformersTarget(model) if execution == "modules" else fused(model)


@cache
def greedy(family: str, prompt: tuple[int, ...]) -> list[int]:
    return reference(model_of(family), prompt, NEW)


# -- Text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["modules", "auto"])
@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize("family", FAMILIES)
def test_drafter_changes_no_token(family: str, drafter: str, execution: str, tmp_path: Path) -> None:
    if execution == "modules" and drafter in OF_LAYERS:
        pytest.skip("a whole forward runs no layers alone")
    target = target_of(family, execution)
    assert target.device.type == target.head_device.type == DEVICE.type
    for settings in settings_of(drafter, target, tmp_path):
        for prompt in PROMPTS:
            out = Engine(target, None, settings, max_rows=24, prefill_chunk=16).generate(prompt, NEW)
            assert out.token_ids == greedy(family, prompt), settings


@pytest.mark.parametrize("drafter", ["jacobi", "lookahead", "prompt_lookup", "suffix_automaton"])
def test_a_seed_is_one_text(drafter: str) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=3)
    engine = Engine(target_of("mistral"))
    plain = engine.generate(PROMPTS[1], NEW, sampling).token_ids
    assert engine.with_drafter(drafter).generate(PROMPTS[1], NEW, sampling).token_ids == plain


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["token_recycling", "draft_model"])
def test_processors_of_all_rows_are_those_of_a_text(drafter: str, temperature: float, tmp_path: Path) -> None:
    target = target_of("llama")
    sampling = SamplingParams(temperature=temperature, seed=3, acceptance="match")
    for processors in (
        [Alternating()],
        [NoRepeatNGramLogitsProcessor(2), MinNewTokensLengthLogitsProcessor(40, 9, [0, 1], device=str(DEVICE))],
        [SequenceBiasLogitsProcessor([[[1], 2.0], [[3, 4], 3.0]])],
    ):
        plain = Engine(target).generate(PROMPTS[1], NEW, sampling, logits_processor=processors).token_ids
        engine = Engine(target, None, settings_of(drafter, target, tmp_path)[0], max_rows=24)
        assert engine.generate(PROMPTS[1], NEW, sampling, logits_processor=processors).token_ids == plain


def test_noise_is_the_cpu_s() -> None:
    here, there = (Noise(5, 1000, torch.device(device)).gumbel(17) for device in (DEVICE, "cpu"))
    assert torch.allclose(here.cpu(), there, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", BACKENDS)
def test_half_precision_writes_a_text_without_ties(attention: str, dtype: torch.dtype) -> None:
    """The benchmark's random model is sure of every token, so that no kernel's rounding shows."""
    target = DescribedTarget.from_model(random_model("toy", dtype, DEVICE), attention=attention)
    prompt = random_prompt(256, 300)
    expected = Engine(TransformersTarget(random_model("toy"))).generate(prompt, 100).token_ids
    for drafter in ("none", "lookahead", "token_recycling"):
        assert Engine(target, None, drafter).generate(prompt, 100).token_ids == expected


# -- Attention ---------------------------------------------------------------------------------------------------------

# What a softmax over [-1, 1] values may be off by, in one dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TREES = {
    "root": [-1],
    "chain": list(range(-1, 15)),
    "tree": [-1, 0, 0, 1, 1, 2, 3, 3, 6, 0, 9, 10, 8, 12, 5],
    "wide": [-1, *([0] * 40), *range(1, 41)],
}


@pytest.mark.few(239)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("length", [0, 1, 100, 1500])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_see_their_ancestors_and_the_window(
    backend: str, window: int | None, length: int, tree: str, dtype: torch.dtype
) -> None:
    """Eight query heads on two key heads of width 64, against one masked softmax in float64."""
    parents = TREES[tree]
    rows, total = len(parents), length + len(parents)
    generator = torch.Generator().manual_seed(length)
    keys, values, query = (
        (torch.rand(1, heads, count, 64, generator=generator) * 2 - 1).to(DEVICE, dtype)
        for heads, count in ((2, total), (2, total), (8, rows))
    )
    store = KVCache([LayerSpec(2, 64, 64, window, DEVICE, dtype)], capacity=length + 1, rows=128)
    for start in range(0, length, 100):
        count = min(100, length - start)
        store.write(0, keys[:, :, start : start + count], values[:, :, start : start + count], start)
        store.commit(range(count))
    draft = Draft([0] * rows, parents)
    part = seam.Text(store).part(draft, device=DEVICE, backend=backend)
    part.store(keys[:, :, length:], values[:, :, length:], 0)
    output = attend(query * 3, part, 0, 64**-0.5)
    assert output.dtype == dtype
    expected = naive(query * 3, keys, values, draft, length, window)
    assert (output.double() - expected).abs().max() < TOLERANCE[dtype]


def naive(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, draft: Draft, length: int, window: int | None
) -> torch.Tensor:
    """[1, 8, T, 64] float64, the mask written out."""
    depths = torch.tensor(draft.depths, device=DEVICE)
    own, seen = length + depths[:, None], torch.cat([torch.arange(length, device=DEVICE), length + depths])
    mask = torch.ones(len(draft), len(seen), dtype=torch.bool, device=DEVICE)
    mask[:, length:] = torch.from_numpy(ancestors(draft.parents)).to(DEVICE)
    if window is not None:
        mask &= own - seen < window
    k, v = (x.double().repeat_interleave(4, 1) for x in (keys, values))
    scores = (query.double() @ k.transpose(2, 3) * 64**-0.5).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1) @ v


def test_numbers_are_read_as_they_were_when_asked_for() -> None:
    numbers = torch.arange(3.0, device=DEVICE)
    told = device_copies.reading(numbers)
    numbers += 1
    assert told() == [0, 1, 2]


# -- Graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_replayed_steps_are_those_that_are_launched(family: str) -> None:
    """On both sides of buckets' borders, after texts of several lengths and a growth of the cache."""
    target = target_of(family, execution="auto")
    own = seam.text(target, capacity=1500, rows=64)
    with target.active():
        while own.length < 1200:
            own.fill([7] * 60, 60, again=False)
            for parents in ([-1], [-1, 0, 0, 1, 1], list(range(-1, 8)), TREES["wide"][:33]):
                outputs = []
                for again in (True, False):
                    outputs.append(own.run(Draft([3] * len(parents), parents), again=again, taps={1}))
                one, other = outputs
                assert one.logits is not None
                assert other.logits is not None
                assert (one.logits - other.logits).abs().max() < 1e-3 * other.logits.abs().max()
                assert (one.hidden[1] - other.hidden[1]).abs().max() < 1e-3 * other.hidden[1].abs().max()
    assert "recorded" in target.executor.graphs()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_texts_of_a_batch_are_those_of_each(family: str) -> None:
    engine = Engine(target_of(family, execution="auto"), None, "token_recycling", max_rows=16)
    prompts = [prompt_of(size, seed=size) for size in (40, 1, 9, 33)]
    found = engine.generate_batch(prompts, NEW, batch=3)
    assert [one.token_ids for one in found] == [greedy(family, prompt) for prompt in prompts]


def test_what_was_warmed_up_is_not_recorded_again() -> None:
    target = DescribedTarget.from_model(random_model("toy", torch.bfloat16, DEVICE))
    target.warm_up(64)
    told = target.describe()["execution"]["CUDA graphs"]
    assert "of 1, 2, 4, 8, 16, 32, 64 rows" in told
    Engine(target, None, "token_recycling", max_rows=64).generate(random_prompt(256, 300), 100)
    assert target.describe()["execution"]["CUDA graphs"] == told


@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.9, seed=3, acceptance="match")])
@pytest.mark.parametrize("drafter", ["eagle", "dflash", "medusa"])
def test_passes_of_heads_are_recorded(drafter: str, sampling: SamplingParams | None, tmp_path: Path) -> None:
    """In half precision, with texts that are plain decoding's."""
    target = fused(new_model("llama", torch.float16).to(DEVICE))
    plain = Engine(target).generate(PROMPTS[1], NEW, sampling).token_ids
    for options in settings_of(drafter, target, tmp_path):
        made: Any = make_drafter({"name": drafter, **options}, target)
        recorded = made.recorded if drafter == "medusa" else made.step.recorded
        assert recorded is not None or drafter == "dflash"  # of which some heads have windows or convolutions
        engine = Engine(target, None, made, max_rows=24)
        engine.warm_up()
        assert engine.generate(PROMPTS[1], NEW, sampling).token_ids == plain, options
        assert recorded is None or recorded.failed is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(6144, 4096, False), (1536, 576, True), (576, 1536, False)])
def test_cuts_among_which_time_chooses_give_the_same_bits(
    outputs: int, inputs: int, gated: bool, dtype: torch.dtype
) -> None:
    shared = products.shared_of(DEVICE)
    weight = torch.randn(outputs * (1 + gated), inputs, dtype=dtype, device=DEVICE)
    for bucket in products.buckets_of(shared):
        rows = torch.randn(bucket - 1, inputs, dtype=dtype, device=DEVICE)
        first = products.product(rows, weight, None, gated=gated)
        for cut in products.offered(outputs, inputs, gated, bucket, shared):
            assert torch.equal(products.product(rows, weight, None, gated=gated, cuts={bucket: cut}), first), cut


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_draws_in_a_graph_are_those_behind_it(dtype: torch.dtype) -> None:
    """By torch's operations, with the noise and the temperature as they are there."""
    logits, rows = 3 * torch.randn(64, 49152, device=DEVICE).to(dtype), torch.arange(64, device=DEVICE)
    noise, warm = Noise(5, 49152, DEVICE), TemperatureLogitsWarper(0.8)
    where = {
        "draws": torch.tensor((noise.start, inverse_bits(0.8)), device=DEVICE),
        "counts": torch.zeros_like(rows[:3]),
    }
    picked = pick.pick(logits, {**where, "places": 100 + rows})
    expected = finite_argmax(noise.gumbel_at(101 + rows) + warm(None, logits.float()))
    assert torch.equal(picked[:, :2], torch.stack((finite_argmax(logits), expected), 1))


def test_a_warm_up_chooses_cuts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "cache_folder", lambda: tmp_path)
    model, prompt = random_model("toy", torch.bfloat16, DEVICE), random_prompt(256, 20)
    target = DescribedTarget.from_model(model)
    text = Engine(target).generate(prompt, 50).token_ids
    assert "a warm-up on a GPU times others" in target.describe()["execution"]["cuts of products"]
    target.warm_up(32)
    told = target.describe()["execution"]["cuts of products"]
    assert "that were timed" in told
    assert Engine(target).generate(prompt, 50).token_ids == text
    again = DescribedTarget.from_model(random_model("toy", torch.bfloat16, DEVICE))
    assert again.describe()["execution"]["cuts of products"] == told


def test_a_capture_that_fails_leaves_the_device_as_it_was() -> None:
    """Here for a copy to the host, which no graph takes."""
    recorder, here, before = CudaRecorder(DEVICE), torch.cuda.current_stream(), torch.cuda.get_rng_state()

    def work() -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        ones = torch.ones(3, device=DEVICE)
        return ones * ones.sum().item(), {}

    with pytest.raises(RuntimeError):
        recorder.record(work)
    assert torch.cuda.current_stream() == here
    first = torch.rand(4, device=DEVICE)
    torch.cuda.set_rng_state(before)
    assert torch.equal(torch.rand(4, device=DEVICE), first)


def test_a_graph_is_recorded_after_all_others_are_gone() -> None:
    """While what one of them gave is still held."""
    recorder, ones = CudaRecorder(DEVICE), torch.ones(3, device=DEVICE)

    def work() -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        return ones + 1, {}

    (held, _), replay = recorder.record(work)
    replay()
    del replay
    (given, _), replay = recorder.record(work)
    replay()
    assert held.tolist() == given.tolist() == [2, 2, 2]


# -- Memory ------------------------------------------------------------------------------------------------------------


def peak(target: Any, new: int, prompt: int = 5) -> int:
    """Bytes of the device's memory that a generation adds at its peak."""
    engine = Engine(target, None, "prompt_lookup", max_rows=16, prefill_chunk=64)
    engine.generate(prompt_of(prompt), new)  # workspaces of the libraries and tables of positions stay
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert len(engine.generate(prompt_of(prompt), new).token_ids) == new
    return torch.cuda.max_memory_allocated() - before


def test_rolling_buffer_stays() -> None:
    """Eight windows' length and thirty-two: the same bytes, where a cache of the whole text grows."""
    ring, whole = (
        fused(new_model("mistral", torch.float32, sliding_window=window, max_position_embeddings=4096).to(DEVICE))
        for window in (64, None)
    )
    grown = 3 * 2 * 2 * 8 * 4 * (2048 - 512)  # layers, keys and values, heads, width, bytes
    assert peak(whole, 2048) - peak(whole, 512) >= grown
    assert abs(peak(ring, 2048) - peak(ring, 512)) < grown // 8


def test_prefill_memory_does_not_grow_with_the_prompt() -> None:
    model = new_model("mistral", torch.float32, sliding_window=64, max_position_embeddings=4096)
    target = fused(model.to(DEVICE))
    assert abs(peak(target, 8, prompt=3000) - peak(target, 8, prompt=500)) < 1 << 16
