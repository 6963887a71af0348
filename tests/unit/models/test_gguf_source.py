"""GGUF files whose quantised blocks stay what they are: transformers' own numbers, and no text changed by a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine, SamplingParams, TransformersTarget
from specdec.errors import ConfigError
from specdec.models.inspection import eos_ids_of
from specdec.models.live_model import load_model
from specdec.native import library as native
from specdec.native.types import Kind
from specdec.runners.block_weight import BlockWeight
from specdec.runners.linear import PackedWeight
from tests import seam
from tests.packed_checkpoints import blocks_of, weights_of
from tests.quantised_files import FAMILIES, FORMATS, quantised_file
from tests.sums import InOrder

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
MIXED = ("Q4_K", "Q6_K", "Q5_0", "Q8_0")
SMALL: dict[str, Any] = {"max_rows": 24, "prefill_chunk": 16}
PLACE = {"_name_or_path": ""}
PROMPT = (3, 9, 4, 3, 9, 4, 11, 3, 9)


def target_of(file: Path, **options: Any) -> Any:
    return TransformersTarget.from_pretrained(file, **options)


def dense(file: Path, dtype: str = "float32") -> Any:
    return load_model(file, dtype=dtype, device=None, device_map=None)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in FAMILIES), ("llama", True)])
def test_weights_are_those_that_transformers_makes(family: str, tied: bool, dtype: str, tmp_path: Path) -> None:
    """All of them, in the order that transformers has them in, as in the dense model of the same file."""
    file = quantised_file(tmp_path / "small.gguf", MIXED, family=family, tied=tied)
    target, expected = target_of(file, dtype=dtype), dense(file, dtype)
    assert str(target.describe()["model"]["weights"]).startswith("quantised blocks as in the file")
    assert all(
        isinstance(kernel, BlockWeight)
        for names, kernel in target.executor.kernels()
        if "gate.weight" not in str(names)
    )
    own, theirs = weights_of(target), dict(expected.named_parameters())
    assert {*own} == {*theirs}
    for name, weight in own.items():
        assert torch.equal(weight, theirs[name]), name
    assert target.eos_ids == eos_ids_of(expected)
    assert target.config.to_dict() | PLACE == expected.config.to_dict() | PLACE


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_native_layers_run_them(family: str, tmp_path: Path) -> None:
    """No dense weight is made of a matrix, and logits are as near to the float32 model's as bfloat16's own."""
    every = {name: {"num_experts_per_tok": count} for name, count in (("qwen3moe", 8), ("mixtral", 4))}
    # In bfloat16 a row may have other experts than in float32, which is more than rounding.
    file = quantised_file(tmp_path / "small.gguf", MIXED, family=family, **every.get(family, {}))
    target = target_of(file)
    assert target.options["runner"] == "native"
    assert "4_K" in str(target.describe()["model"]["weights"])
    assert target.describe()["model"]["parameters"] == sum(weight.numel() for weight in dense(file).parameters())
    exact = target_of(file, dtype="float32")
    assert exact.options["runner"] == "native"
    with torch.inference_mode():
        expected = dense(file)(torch.tensor([PROMPT])).logits[0]
        model = dense(file, "bfloat16")
        model.set_attn_implementation("eager")
        with InOrder():  # how torch rounds is its machine's
            half = model(torch.tensor([PROMPT])).logits[0]
        found = [_logits(one) for one in (target, exact)]
    rounding = (half.float() - expected).square().mean()
    assert (found[0].float() - expected).square().mean() < 1.45 * rounding
    torch.testing.assert_close(found[1], expected, atol=1e-3 * float(expected.abs().max()), rtol=0)


def _logits(target: TransformersTarget) -> torch.Tensor:
    with target.active():
        found = seam.text(target).run(PROMPT).logits
    assert found is not None
    return found


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("kind", [*FORMATS, "F16"])
def test_plain_decoding_is_the_same_in_any_company(kind: str, tmp_path: Path) -> None:
    """Of every format, greedy and drawn: with eight rows a step, and in a batch, as with one row."""
    target = target_of(quantised_file(tmp_path / "small.gguf", (kind,)))
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=5)):
        plain = Engine(target, None, "none", **SMALL).generate(PROMPT, 24, sampling).token_ids
        for drafter in ("prompt_lookup", "auto"):
            assert Engine(target, None, drafter, **SMALL).generate(PROMPT, 24, sampling).token_ids == plain
    assert len(set(plain)) > 5


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in FAMILIES), ("llama", True)])
def test_float16_stays_so_and_is_computed_in_float32(family: str, tied: bool, tmp_path: Path) -> None:
    """By default where native layers run it, with the numbers of the file, and in rows that others do not change."""
    file = quantised_file(tmp_path / "small.gguf", ("F16",), family=family, tied=tied)
    target, expected = target_of(file), dense(file)
    assert (target.dtype, target.options["runner"], target.batch_invariant) == (torch.float32, "native", True)
    assert str(target.describe()["model"]["weights"]).startswith("float16 as in the file: ")
    assert {part.format.name for store in blocks_of(target).values() for part in store.parts} == {"F16"}
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected.state_dict()[name]), name
    with torch.inference_mode():
        logits = expected(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(_logits(target), logits, atol=1e-3 * float(logits.abs().max()), rtol=0)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"execution": "modules"}, torch.float16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_float16_is_dense_otherwise(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf", ("F16",))
    target = target_of(file, **options)
    assert target.dtype is dtype
    assert str(target.describe()["model"]["weights"]).startswith("dequantised: ")
    assert target.options["runner"] == "modules" or not blocks_of(target)


@needs_compiler
def test_float16_beside_quantised_blocks_stays_so_in_float32(tmp_path: Path) -> None:
    """Also in one product, whose rows are not rounded then; and inputs that are not 32 at a time are dense."""
    file = quantised_file(tmp_path / "small.gguf", ("F16", "Q4_0"))
    target, expected = target_of(file, dtype="float32"), dense(file)
    told = str(target.describe()["model"]["weights"])
    assert told.startswith("quantised blocks as in the file: ")
    assert " in F16" in told
    assert all(isinstance(kernel, BlockWeight) for _, kernel in target.executor.kernels())
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected.state_dict()[name]), name
    file = quantised_file(tmp_path / "odd.gguf", ("F16",), intermediate_size=48)
    target, expected = target_of(file), dense(file)
    assert target.options["runner"] == "native"
    name = "model.layers.0.mlp.down_proj.weight"
    down = next(kernel for names, kernel in target.executor.kernels() if name in names)
    assert type(down) is PackedWeight
    assert down.described.kind == Kind.FLOAT16
    assert torch.equal(weights_of(target)[name], expected.state_dict()[name])


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_in_bytes_are_another_model_and_as_exact(kind: str, tmp_path: Path) -> None:
    """Its texts, too, are the same with any drafter and in a batch; results and descriptions say what it is."""
    file = quantised_file(tmp_path / "small.gguf", (kind,))
    target, default = target_of(file, activations="int8"), target_of(file)
    assert target.options["runner"] == "native"
    assert (target.activations, default.activations) == ("int8", None)
    assert target.options["activations"] == target.describe()["model"]["activations"] == "int8"
    assert "in int8" in str(target.describe()["model"]["weights"])
    assert not torch.equal(_logits(target), _logits(default))
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=5)):
        plain = Engine(target, None, "none", **SMALL).generate(PROMPT, 24, sampling)
        assert plain.stats.activations == "int8"
        for drafter in ("prompt_lookup", "auto"):
            engine = Engine(target, None, drafter, **SMALL)
            assert engine.generate(PROMPT, 24, sampling).token_ids == plain.token_ids
            batch = list(engine.generate_batch([PROMPT, PROMPT[2:], PROMPT], 24, sampling, batch=3))
            assert batch[0].token_ids == plain.token_ids


@needs_compiler
def test_rows_that_stay_as_they_are_are_told_of(tmp_path: Path) -> None:
    target = target_of(quantised_file(tmp_path / "small.gguf", ("F16", "Q4_0")), activations="int8")
    assert "other matrices, such as lm_head" in str(target.describe()["model"]["weights"])


@needs_compiler
def test_rows_in_bytes_need_blocks(tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf")
    for path, options, why in (
        ("tiny", {}, "'tiny' is no GGUF file"),
        (file, {"execution": "modules"}, "another way to run its layers"),
        (file, {"dtype": "float64"}, "in float32 and bfloat16"),
    ):
        with pytest.raises(ConfigError, match=why):
            target_of(path, activations="int8", **options)
    with pytest.raises(ConfigError, match="none of its weights are in blocks of integers"):
        target_of(quantised_file(tmp_path / "half.gguf", ("F16",)), activations="int8")
    beside = quantised_file(tmp_path / "mixed.gguf", ("Q4_0", "Q4_0", "Q4_0", "F16"))
    told = str(target_of(beside, activations="int8", dtype="float32").describe()["model"]["weights"])
    assert "but not those of " in told


@pytest.mark.slow
@needs_compiler
def test_what_other_ways_to_run_it_hold(tmp_path: Path) -> None:
    """Asked for by name they have dense weights, and it is said."""
    file = quantised_file(tmp_path / "small.gguf")
    for options in ({"execution": "modules"}, {"dtype": "float64"}):
        target = target_of(file, **options)
        assert str(target.describe()["model"]["weights"]).startswith("dequantised: ")
        assert options.get("execution") == "modules" or not blocks_of(target)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("kinds", [("F16", "Q4_0"), ("Q8_0", "F32"), ("Q4_0", "Q4_0", "F16")])
def test_matrices_of_other_kinds_are_held_as_before(kinds: tuple[str, ...], tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf", kinds)
    target, expected = target_of(file), dense(file, "bfloat16")
    assert target.options["runner"] == "native"
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected.state_dict()[name]), name
    assert {type(kernel) for _, kernel in target.executor.kernels()} == {BlockWeight, PackedWeight}


@needs_compiler
def test_a_head_may_have_an_embedding_of_another_kind(tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf", ("F16", *["Q4_0"] * 40), tied=True)
    target, expected = target_of(file), dense(file, "bfloat16")
    assert target.options["runner"] == "native"
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected.state_dict()[name]), name
