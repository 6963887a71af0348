"""Models whose quantised blocks stay what they are: transformers' own numbers, and no text changed by a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec import Engine, SamplingParams, TransformersTarget
from specdec.errors import ConfigError
from specdec.models.loading import load_model, load_weights
from specdec.native import library as native
from specdec.native.types import Kind
from specdec.runners.block_weight import BlockWeight, in_bytes
from specdec.runners.known_layers import in_blocks
from specdec.runners.linear import PackedLinear, PackedModule, PackedWeight, TiedEmbedding
from tests import seam
from tests.quantised_files import FAMILIES, FORMATS, quantised_file
from tests.sums import InOrder

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
MIXED = ("Q4_K", "Q6_K", "Q5_0", "Q8_0")
SMALL: dict[str, Any] = {"max_rows": 24, "prefill_chunk": 16}
PLACE = {"_name_or_path": ""}
PROMPT = (3, 9, 4, 3, 9, 4, 11, 3, 9)


def load(file: Path, dtype: str = "auto", **options: Any) -> Any:
    return load_weights(file, dtype=dtype, device=None, device_map=None, trust_remote_code=False, **options)


def target_of(file: Path, **options: Any) -> TransformersTarget:
    return TransformersTarget.from_pretrained(file, **options)


def dense(file: Path, dtype: str = "float32") -> Any:
    return load_model(file, dtype=dtype, device=None, device_map=None, trust_remote_code=False)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in FAMILIES), ("llama", True)])
def test_weights_are_those_that_transformers_makes(family: str, tied: bool, dtype: str, tmp_path: Path) -> None:
    """All of them, in the order that transformers has them in, as in the dense model of the same file."""
    file = quantised_file(tmp_path / "small.gguf", MIXED, family=family, tied=tied)
    model, told = load(file, dtype, in_blocks=True)
    expected = dense(file, dtype)
    assert told.startswith("quantised blocks as in the file")
    kinds = {type(module) for module in model.modules()}
    assert PackedLinear in kinds
    assert TiedEmbedding in kinds
    assert not {nn.Linear, nn.Embedding} & kinds
    own, theirs = model.state_dict(), expected.state_dict()
    assert {*own} | {"lm_head.weight"} == {*theirs} | {"lm_head.weight"}
    for name, weight in own.items():
        assert torch.equal(weight, theirs[name]), name
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert model.config.to_dict() | PLACE == expected.config.to_dict() | PLACE


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_native_layers_run_them(family: str, tmp_path: Path) -> None:
    """No dense weight is made of a matrix, and logits are as near to the float32 model's as bfloat16's own."""
    every = {name: {"num_experts_per_tok": count} for name, count in (("qwen3moe", 8), ("mixtral", 4))}
    # In bfloat16 a row may have other experts than in float32, which is more than rounding.
    file = quantised_file(tmp_path / "small.gguf", MIXED, family=family, **every.get(family, {}))
    target = target_of(file)
    assert target.runner.name == "native"
    assert all(not isinstance(module, nn.Linear | nn.Embedding) for module in target.model.modules())
    assert "4_K" in str(target.describe()["model"]["weights"])
    assert target.describe()["model"]["parameters"] == sum(weight.numel() for weight in dense(file).parameters())
    exact = target_of(file, dtype="float32")
    assert exact.runner.name == "native"
    with torch.inference_mode():
        expected = dense(file)(torch.tensor([PROMPT])).logits[0]
        model = dense(file, "bfloat16")
        model.set_attn_implementation("eager")
        with InOrder():  # how torch rounds is its machine's
            half = model(torch.tensor([PROMPT])).logits[0]
        own = target.model(torch.tensor([PROMPT])).logits[0]
        found = [_logits(one) for one in (target, exact)]
    rounding = (half.float() - expected).square().mean()
    assert (found[0].float() - expected).square().mean() < 1.45 * rounding
    assert (own.float() - expected).square().mean() < 1.45 * rounding
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
    assert (target.dtype, target.runner.name, target.batch_invariant) == (torch.float32, "native", True)
    assert str(target.describe()["model"]["weights"]).startswith("float16 as in the file: ")
    stores = [store for module in target.model.modules() if isinstance(module, PackedModule) for store in module.stores]
    assert {part.format.name for store in stores for part in store.parts} == {"F16"}
    for name, weight in target.plain_model().state_dict().items():
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
        ({"execution": "fused"}, torch.float16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_float16_is_dense_otherwise(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf", ("F16",))
    target = target_of(file, **options)
    assert target.dtype is dtype
    assert str(target.describe()["model"]["weights"]).startswith("dequantised: ")
    assert not any(map(in_blocks, target.model.modules()))


@needs_compiler
def test_float16_beside_quantised_blocks_stays_so_in_float32(tmp_path: Path) -> None:
    """Also in one product, whose rows are not rounded then; and inputs that are not 32 at a time are dense."""
    file = quantised_file(tmp_path / "small.gguf", ("F16", "Q4_0"))
    target, expected = target_of(file, dtype="float32"), dense(file)
    told = str(target.describe()["model"]["weights"])
    assert told.startswith("quantised blocks as in the file: ")
    assert " in F16" in told
    assert not any(isinstance(module, nn.Linear) for module in target.model.modules())
    for name, weight in target.plain_model().state_dict().items():
        assert torch.equal(weight, expected.state_dict()[name]), name
    file = quantised_file(tmp_path / "odd.gguf", ("F16",), intermediate_size=48)
    target, expected = target_of(file), dense(file)
    assert target.runner.name == "native"
    down: Any = target.model.get_submodule("model.layers.0.mlp.down_proj")
    assert type(down.store) is PackedWeight
    assert down.store.described.kind == Kind.FLOAT16
    assert torch.equal(down.weight, expected.get_submodule("model.layers.0.mlp.down_proj").weight)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_in_bytes_are_another_model_and_as_exact(kind: str, tmp_path: Path) -> None:
    """Its texts, too, are the same with any drafter and in a batch; results and descriptions say what it is."""
    file = quantised_file(tmp_path / "small.gguf", (kind,))
    target, default = target_of(file, activations="int8"), target_of(file)
    assert target.runner.name == "native"
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


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_bytes_pass_the_check_at_load(family: str, dtype: str, tmp_path: Path) -> None:
    """Against the model's own modules in float32, whose rows are rounded to bytes as well."""
    file = quantised_file(tmp_path / "small.gguf", MIXED, family=family)
    target = target_of(file, activations="int8", dtype=dtype)
    assert target.runner.name == "native"
    assert target.plan.others.keys() <= {"fused"}


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(("near", "same"), [(2.0**-21, True), (2.0**-3, False)])
def test_a_byte_that_another_processor_rounds_otherwise_is_no_other_model(
    near: float, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it lies as near to the middle as float32's rounding; the model's modules, which do so, are the runner."""

    def otherwise(weight: BlockWeight, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        return weight._by_dequantised(in_bytes(hidden, 127 * near), rows)

    def differs(target: TransformersTarget, _: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(BlockWeight, "linear", otherwise)
            found.append(target._reference.differs())

    found: list[str | None] = []
    monkeypatch.setattr(TransformersTarget, "_differs", differs)
    target_of(quantised_file(tmp_path / "small.gguf", MIXED), activations="int8", dtype="float32")
    assert [why is None for why in found] == [same]


@needs_compiler
def test_rows_that_stay_as_they_are_are_told_of(tmp_path: Path) -> None:
    target = target_of(quantised_file(tmp_path / "small.gguf", ("F16", "Q4_0")), activations="int8")
    assert "other matrices, such as model.layers.0" in str(target.describe()["model"]["weights"])


@needs_compiler
def test_rows_in_bytes_need_blocks(tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf")
    for path, options, why in (
        ("tiny", {}, "'tiny' is no GGUF file"),
        (file, {"execution": "fused"}, "another way to run its layers"),
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
    for options in ({"execution": "modules"}, {"execution": "fused"}, {"dtype": "float64"}):
        target = target_of(file, **options)
        assert str(target.describe()["model"]["weights"]).startswith("dequantised: ")
        assert not any(map(in_blocks, target.model.modules()))


@needs_compiler
def test_a_model_in_blocks_has_a_plain_one(tmp_path: Path) -> None:
    """A copy of transformers' classes, whose weights are those of the blocks in bfloat16."""
    file = quantised_file(tmp_path / "small.gguf", MIXED)
    target = target_of(file)
    plain, expected = target.plain_model(), dense(file, "bfloat16")
    assert {type(module) for module in plain.modules()} == {type(module) for module in expected.modules()}
    for name, weight in expected.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight), name
    assert {name for name, _ in target.named_weights()} == {name for name, _ in expected.named_parameters()}


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("kinds", [("F16", "Q4_0"), ("Q8_0", "F32"), ("Q4_0", "Q4_0", "F16")])
def test_matrices_of_other_kinds_are_held_as_before(kinds: tuple[str, ...], tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf", kinds)
    target, expected = target_of(file), dense(file, "bfloat16")
    assert target.runner.name == "native"
    for name, weight in target.plain_model().state_dict().items():
        assert torch.equal(weight, expected.state_dict()[name]), name
    stores = [module.store for module in target.model.modules() if isinstance(module, PackedLinear)]
    assert {type(store) for store in stores} == {BlockWeight, PackedWeight}


@needs_compiler
def test_a_head_may_have_an_embedding_of_another_kind(tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf", ("F16", *["Q4_0"] * 40), tied=True)
    target, expected = target_of(file), dense(file, "bfloat16")
    assert target.runner.name == "native"
    for name, weight in target.plain_model().state_dict().items():
        assert torch.equal(weight, expected.state_dict()[name]), name
