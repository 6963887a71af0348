"""Matrices in MXFP4 stay quantised, in blocks of integers that stand for the very same numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specdec import Engine, TransformersTarget
from specdec.decoder.weights.mxfp4 import Mxfp4Rows
from specdec.decoder.weights.quantised import quantised_source
from specdec.errors import CheckpointError
from specdec.native import library as native
from specdec.runners.block_weight import BlockWeight
from tests.decoders import reference_logits
from tests.gguf_families import EXPERTS, shapes_of, write_family
from tests.models import logits_of, new_model
from tests.packed_checkpoints import blocks_of, weights_of
from tests.quantised_files import quantised_file, random_blocks

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
PLACE = "model.layers.0.mlp.experts"
PARTS = ("gate", "up", "down")
TEXT = (3, 9, 4, 3, 9, 4, 11, 3, 9) * 4


def made(rows: np.ndarray) -> Mxfp4Rows:
    blocks = rows.reshape(len(rows), -1, 17)
    return Mxfp4Rows(blocks[..., 0], blocks[..., 1:], lambda: None)


@needs_compiler
@pytest.mark.parametrize(
    ("exponents", "form"),
    [
        (range(104, 144), "Q5_0"),  # powers that are float16, from its smallest subnormal to its largest
        ((103,), "INT8_32"),
        ((144,), "INT8_32"),
        (range(2, 252), "INT8_32"),
    ],
)
def test_values_are_those_of_the_package_gguf(exponents: Sequence[int], form: str) -> None:
    """Of every code and exponent; in blocks, looked up or multiplied, and dequantised."""
    rows = random_blocks("MXFP4", 64, 256)
    rows[0].reshape(-1, 17)[:, 1:] = np.arange(128).reshape(8, 16)
    rows.reshape(64, -1, 17)[..., 0] = np.resize(np.array(exponents, np.uint8), (64, 8))
    expected = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.MXFP4))
    found = made(rows)
    assert (found.format, found.shape) == (form, (64, 8 * (22 if form == "Q5_0" else 36)))
    assert torch.equal(found.dense(0, 64), expected)
    tensor = found.tensor()
    assert tensor is not None
    weight = BlockWeight([tensor], None, torch.float32)
    assert torch.equal(weight.unpack(), expected)
    assert torch.equal(weight(torch.eye(256)), expected.t())


@needs_compiler
def test_zeros_may_have_any_exponent() -> None:
    """Those of both signs; a dead row has them."""
    rows = random_blocks("MXFP4", 32, 64)
    rows[3] = np.array([[0, *[0x80] * 16], [255, *[0x08] * 16]], np.uint8).ravel()
    found = made(rows)
    tensor = found.tensor()
    assert found.format == "Q5_0"
    assert tensor is not None
    expected = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.MXFP4))
    assert torch.equal(BlockWeight([tensor], None, torch.float32).unpack(), expected)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("family", ["qwen3moe", "mixtral", "qwen2"])
def test_files_stay_in_blocks(family: str, tmp_path: Path) -> None:
    """Experts among others, as llama.cpp quantises to MXFP4, and all matrices; each row's bits are its own."""
    file = quantised_file(tmp_path / "small.gguf", ("MXFP4", "Q8_0"), family=family)
    target = TransformersTarget.from_pretrained(file, dtype="float32")
    assert target.options["runner"] == "native"
    assert " in MXFP4" in str(target.describe()["model"]["weights"])
    dense = weights_of(TransformersTarget.from_pretrained(file, dtype="float32", execution="modules"))
    assert all(torch.equal(weight, dense[name]) for name, weight in weights_of(target).items())
    assert any(kernel.parts[0].format.name == "Q5_0" for kernel in blocks_of(target).values())
    half = TransformersTarget.from_pretrained(file)
    assert torch.equal(logits_of(half, TEXT, 7), logits_of(half, TEXT, 1))


def stacked(folder: Path, **changes: Any) -> tuple[Mapping[str, torch.Tensor], Any]:
    """A layer's experts as gpt-oss's folders have them, and the source of their tensors."""
    random = torch.Generator().manual_seed(0)
    tensors = dict[str, torch.Tensor]()
    for name, outputs, blocks in (("gate_up_proj", 96, 2), ("down_proj", 64, 3)):
        tensors[f"{PLACE}.{name}_blocks"] = torch.randint(256, (3, outputs, blocks, 16), generator=random).byte()
        tensors[f"{PLACE}.{name}_scales"] = torch.randint(110, 126, (3, outputs, blocks), generator=random).byte()
        tensors[f"{PLACE}.{name}_bias"] = torch.randn(3, outputs, generator=random).bfloat16()
    tensors |= {f"{PLACE}.{name}": value for name, value in changes.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors, quantised_source(folder, {"quant_method": "mxfp4"}, "GptOssForCausalLM")


@needs_compiler
def test_experts_of_a_folder_are_those_of_transformers(tmp_path: Path) -> None:
    """One by one, gate and up apart; in blocks and dequantised; the outputs of both alternate in the file."""
    tensors, source = stacked(tmp_path)
    for whole, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        own = [tensors[f"{PLACE}.{whole}_{kind}"] for kind in ("blocks", "scales")]
        theirs = convert_moe_packed_tensors(*own, dtype=torch.float32).transpose(1, 2)  # [E, out, in]
        for number in range(3):
            for turn, part in enumerate(parts):
                name = f"{PLACE}.{number}.{part}_proj"
                expected = theirs[number, turn :: len(parts)]
                assert source.shapes[f"{name}.weight"] == tuple(expected.shape)
                assert torch.equal(source.read(f"{name}.weight"), expected)
                held = BlockWeight([source.blocks(f"{name}.weight")], None, torch.float32)
                assert torch.equal(held.unpack(), expected)
                bias = tensors[f"{PLACE}.{whole}_bias"][number, turn :: len(parts)]
                assert torch.equal(source.read(f"{name}.bias"), bias.float())
    assert {*source.shapes} == {
        f"{PLACE}.{n}.{part}_proj.{kind}"
        for n in range(3)
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"down_proj_blocks": torch.zeros(3, 64, 3, 8, dtype=torch.uint8)},
            r"\[3, 64, 3, 8\] in place of \[3, 64, 3, 16\]",
        ),
        (
            {"down_proj_blocks": torch.zeros(3, 64, 48, dtype=torch.uint8)},
            r"in place of \[experts, outputs, blocks, 16\]",
        ),
        ({"down_proj_blocks": torch.zeros(3, 64, 3, 16)}, "of another dtype, such as .*down_proj_blocks, float32"),
        ({"down_proj_scales": torch.zeros(3, 64, 2, dtype=torch.uint8)}, r"\[3, 64, 2\] in place of \[3, 64, 3\]"),
        (
            {"gate_up_proj_blocks": torch.zeros(3, 95, 2, 16, dtype=torch.uint8)},
            "misshapen, such as .*gate_up_proj_blocks",
        ),
        (
            {"gate_up_proj_blocks": torch.zeros(3, 0, 2, 16, dtype=torch.uint8)},
            "misshapen, such as .*gate_up_proj_blocks",
        ),
        ({"down_proj_bias": torch.zeros(3)}, r"in place of \[experts, outputs\]"),
    ],
)
def test_other_tensors_are_refused_by_name(changes: dict[str, torch.Tensor], named: str, tmp_path: Path) -> None:
    def read() -> None:
        source = stacked(tmp_path, **changes)[1]
        for name in source.shapes:
            source.read(name)

    with pytest.raises(CheckpointError, match=named):
        read()


def gpt_oss(folder: Path) -> Mapping[str, torch.Tensor]:
    """A folder as gpt-oss's are published; and its dense weights, by transformers' names."""
    model, random = new_model("gpt_oss", torch.float32, intermediate_size=32), torch.Generator().manual_seed(0)
    tensors, dense = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in model.state_dict().items():
        if "experts" in name and tensor.ndim == 3:
            count, inputs, outputs = tensor.shape
            shape = count, outputs, inputs // 32
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=random).byte()
            tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=random).byte()
            own = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
            dense[name] = convert_moe_packed_tensors(*own, dtype=torch.float32)
        else:
            tensors[name] = dense[name] = tensor
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return dense


def test_a_folder_of_gpt_oss_is_the_model_of_its_numbers(tmp_path: Path) -> None:
    """In float64, for which it is dequantised."""
    dense, model = gpt_oss(tmp_path), new_model("gpt_oss", intermediate_size=32)
    model.load_state_dict({name: weight.double() for name, weight in dense.items()})
    target = TransformersTarget.from_pretrained(tmp_path, dtype="float64")
    assert target.options["runner"] == "fused"
    expected = reference_logits(model, list(TEXT))
    torch.testing.assert_close(logits_of(target, TEXT), expected, rtol=0, atol=1e-11 * float(expected.abs().max()))


def assert_runs_in_blocks(place: Path, dense: Mapping[str, torch.Tensor]) -> None:
    """In torch, with its weights in blocks; these and logits are those of transformers' model."""
    target = TransformersTarget.from_pretrained(place, dtype="float32")
    told = str(target.describe()["model"]["weights"])
    assert target.options["runner"] == "fused"
    assert "dequantised" not in told
    held = [kernel for kernel in blocks_of(target).values() if kernel.parts[0].format.name == "Q5_0"]
    assert held
    assert {*weights_of(target)} == {*dense}
    assert all(torch.equal(weight, dense[name]) for name, weight in weights_of(target).items())
    theirs = TransformersTarget.from_pretrained(place, dtype="float32", execution="modules")
    assert all(torch.equal(weight, dense[name]) for name, weight in weights_of(theirs).items())
    torch.testing.assert_close(logits_of(target, TEXT), logits_of(theirs, TEXT), rtol=1e-4, atol=1e-4)
    texts = [Engine(target, None, drafter).generate(TEXT, 12).token_ids for drafter in ("none", "lookahead")]
    assert texts[0] == texts[1]


@needs_compiler
def test_a_folder_of_gpt_oss_runs_in_blocks(tmp_path: Path) -> None:
    assert_runs_in_blocks(tmp_path, gpt_oss(tmp_path))


@needs_compiler
def test_a_file_of_gpt_oss_runs_in_blocks(tmp_path: Path) -> None:
    """Experts of gate, up and down are tensors of their own in it."""
    shapes = {f"blk.{layer}.ffn_{part}_exps.weight": (EXPERTS, 64, 64) for layer in range(9) for part in PARTS}
    shapes |= {f"blk.{layer}.ffn_{part}_exps.bias": (EXPERTS, 64) for layer in range(9) for part in PARTS}
    have = {name: shapes[name] for name in shapes_of("gpt-oss") if name in shapes}
    said = {"expert_feed_forward_length": 64}
    file = write_family(tmp_path / "a.gguf", "gpt-oss", said, have, types={"_exps.weight": "MXFP4"})
    assert_runs_in_blocks(
        file, weights_of(TransformersTarget.from_pretrained(file, dtype="float32", execution="modules"))
    )
