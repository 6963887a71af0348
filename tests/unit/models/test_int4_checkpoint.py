"""GPTQ and AWQ checkpoints: the very weights that they stand for, and no text changed by a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import TransformersTarget
from specdec.errors import CheckpointError, ConfigError
from specdec.models.described_checkpoint import DescribedCheckpoint
from specdec.native import library as native
from tests.int4_files import int4_checkpoint
from tests.packed_checkpoints import assert_blocks_are, assert_weights_are, edit, load, weights_of

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
PROMPT = (3, 9, 4, 3, 9, 4, 11, 3, 9)
KINDS = [
    *(("gptq", size, sym, {}) for size in (32, 64, 128, -1) for sym in (False, True)),
    ("gptq", 64, False, {"checkpoint_format": "gptq_v2"}),
    *(("awq", size, False, {}) for size in (32, 64, 128)),
]


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(("method", "group_size", "sym", "settings"), KINDS)
def test_weights_are_those_of_the_definition(
    method: str, group_size: int, sym: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    """In blocks, looked up or multiplied; and dequantised."""
    expected = int4_checkpoint(tmp_path, method=method, group_size=group_size, sym=sym, settings=settings)
    model, told = load(tmp_path, "float32")
    assert told.startswith(f"int4 ({method.upper()}, {'one group' if group_size < 0 else f'groups of {group_size}'}")
    assert_blocks_are(model, expected, 7 * 3, torch.float32)
    assert_weights_are(tmp_path, expected)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_all_families_run_natively(family: str, method: str, tmp_path: Path) -> None:
    """With biases, and a head that is the embedding; float16 is computed in bfloat16."""
    sizes = {"head_dim": 32} if family in ("qwen3", "gemma2", "gemma3") else {}
    expected = int4_checkpoint(tmp_path, method=method, family=family, tie_word_embeddings=True, **sizes)
    target = TransformersTarget.from_pretrained(tmp_path)
    assert (target.options["runner"], target.dtype) == ("native", torch.bfloat16)
    assert str(target.describe()["model"]["weights"]).startswith(f"int4 ({method.upper()}, groups of 32) in blocks")
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected[name].bfloat16()), name


@needs_compiler
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_stacked_matrices_stay_quantised(method: str, tmp_path: Path) -> None:
    """Phi-3's queries, keys and values, and gate and up, which are one tensor each."""
    expected = int4_checkpoint(tmp_path, method=method, family="phi3")
    assert_blocks_are(load(tmp_path, "float32")[0], expected, 4 * 3, torch.float32)
    assert_weights_are(tmp_path, expected)


@needs_compiler
def test_what_is_not_quantised_stays_dense(tmp_path: Path) -> None:
    """A layer's query alone; its MLP; and a quantised head."""
    kept = ("layers.0.self_attn.q_proj", "layers.1.mlp")
    expected = int4_checkpoint(tmp_path, kept=kept, settings={"modules_to_not_convert": [*kept], "lm_head": True})
    target = TransformersTarget.from_pretrained(tmp_path, dtype="float32")
    assert target.options["runner"] == "native"
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected[name]), name


@needs_compiler
def test_shards_and_zero_biases(tmp_path: Path) -> None:
    """Of several files; biases of zeros that the model does not have, as quantisers write them, are left out."""
    expected = int4_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [name for name in tensors if name.endswith("q_proj.qweight")]
    tensors |= {name.replace("qweight", "bias"): torch.zeros(128, dtype=torch.float16) for name in names}
    shards = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for shard in {*shards.values()}:
        save_file({name: tensors[name].clone() for name in tensors if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    model, _ = load(tmp_path, "float32")
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("method", "settings", "named"),
    [
        ("gptq", {"bits": 8}, "bits 8"),
        ("gptq", {"bits": True}, "bits True"),
        ("gptq", {"bits": None}, "bits None"),
        ("awq", {"bits": 3}, "bits 3"),
        ("gptq", {"group_size": 48}, "group_size 48"),
        ("awq", {"group_size": 0}, "group_size 0"),
        ("awq", {"group_size": "128"}, "group_size '128'"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format True"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"version": "exllama"}, "version 'exllama'"),
        ("awq", {"zero_point": False}, "zero_point False"),
    ],
)
def test_other_settings_are_refused_by_name(method: str, settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    int4_checkpoint(tmp_path, method=method)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"is quantised by {method} with {named}, .* give a checkpoint"):
        load(tmp_path)


def test_transformers_loads_what_its_packages_are_there_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not here, which is what is found then."""
    int4_checkpoint(tmp_path, settings={"bits": 8})
    monkeypatch.setattr("specdec.decoder.weights.quantised.find_spec", lambda name: name)
    with pytest.raises(CheckpointError, match=r"cannot load a causal language model from .*(ImportError|RuntimeError)"):
        load(tmp_path)


PLACE = "model.layers.1.mlp.up_proj"


def _permute(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PLACE}.g_idx"] = tensors[f"{PLACE}.g_idx"].flip(0)


@pytest.mark.few(2)
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_permute, f"'{PLACE}.g_idx' in .* side by side .* desc_act=false"),
        (lambda tensors: tensors.pop(f"{PLACE}.qzeros"), f"1 missing, such as {PLACE}.qzeros"),
        (lambda tensors: tensors.pop(f"{PLACE}.scales"), f"1 missing, such as {PLACE}.scales"),
        (lambda tensors: tensors.pop(f"{PLACE}.qweight"), f"1 missing, such as {PLACE}.weight"),
        (lambda tensors: tensors.pop("model.norm.weight"), "1 missing, such as model.norm.weight"),
        (
            lambda tensors: tensors.update({f"{PLACE}.qweight": torch.zeros(32, 256, dtype=torch.int32)}),
            rf"1 misshapen, such as {PLACE}.weight, \[256, 256\] in place of \[256, 128\]",
        ),
        (
            lambda tensors: tensors.update({f"{PLACE}.qweight": torch.zeros(16, 256)}),
            f"1 of another dtype, such as {PLACE}.qweight, float32",
        ),
        (
            lambda tensors: tensors.update({f"{PLACE}.scales": torch.full((4, 256), 1e-3)}),
            f"'{PLACE}.scales' in .* are float32, and blocks' scales are float16",
        ),
        (
            lambda tensors: tensors[f"{PLACE}.scales"][3].fill_(torch.nan),
            f"'{PLACE}.scales' in .* holds NaN or infinity; download",
        ),
        (
            lambda tensors: tensors.update({f"{PLACE}.bias": torch.ones(256)}),
            f"1 extra, such as {PLACE}.bias",
        ),
    ],
)
def test_other_tensors_are_refused_by_name(in_blocks: bool, change: Any, named: str, tmp_path: Path) -> None:
    int4_checkpoint(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path, in_blocks=in_blocks)


def test_a_config_alone_quantises_nothing(tmp_path: Path) -> None:
    """Dense weights beside a config that says otherwise were taken, with no word of it."""
    int4_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("qweight")])
    with pytest.raises(CheckpointError, match=r"none of its tensors is a qweight; remove quantization_config from"):
        load(tmp_path)


def test_desc_act_needs_its_groups(tmp_path: Path) -> None:
    """Inputs that lie in order after all are as any others; without a word of them they are refused."""
    expected = int4_checkpoint(tmp_path, settings={"desc_act": True})
    model, _ = load(tmp_path, "float32")
    assert torch.equal(weights_of(model)[f"{PLACE}.weight"], expected[f"{PLACE}.weight"])
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("g_idx")])
    with pytest.raises(CheckpointError, match=r"1 missing, such as .*g_idx, which desc_act=true asks for"):
        load(tmp_path)


@needs_compiler
def test_a_last_group_may_be_smaller(tmp_path: Path) -> None:
    """Of whole blocks; inputs that are none are refused."""
    expected = int4_checkpoint(tmp_path / "whole", group_size=64, intermediate_size=160)
    model, _ = load(tmp_path / "whole", "float32")
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, expected[name]), name
    int4_checkpoint(tmp_path / "part", group_size=64, intermediate_size=80)
    with pytest.raises(
        CheckpointError, match=r"down_proj' in .* is 128 x 80, and outputs are packed by 8, inputs by 32"
    ):
        load(tmp_path / "part")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "native products need a C compiler"),
        ({"dtype": "float16"}, "native products compute in float32 and bfloat16"),
        ({"device": "meta"}, "native products run on a CPU"),
    ],
)
def test_what_falls_back_says_why(
    options: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    int4_checkpoint(tmp_path)
    if not options:
        monkeypatch.setattr("specdec.runners.linear.library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C compiler")
    found = DescribedCheckpoint.opened(tmp_path, **{"dtype": "float32", **options})
    assert isinstance(found, DescribedCheckpoint)
    assert str(found.why_dense).startswith(why)


def test_other_models_and_places_are_refused(tmp_path: Path) -> None:
    int4_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="quantised by gptq, and device_map"):
        load(tmp_path, device_map="auto")
    with pytest.raises(ConfigError, match="activations='int8' needs quantised blocks"):
        load(tmp_path, in_blocks=False, activations="int8")
    with pytest.raises(ConfigError, match="needs quantised blocks as they lie, and native products"):
        load(tmp_path, "float64", activations="int8")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "stablelm"}))
    with pytest.raises(CheckpointError, match=r"'stablelm' is none of .*llama.*install the packages gptqmodel"):
        load(tmp_path)
    told = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    with pytest.raises(CheckpointError, match="none of its tensors is a quant_state or SCB"):
        load(tmp_path)


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    """Another file may have it too, of an older save; an index that contradicts the files is refused."""
    expected = int4_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    name = "model.norm.weight"
    parts = [{name: tensors.pop(name)}, tensors | {name: torch.full_like(expected[name], 3.0)}]
    places = {key: f"model-{1 + (key != name)}.safetensors" for key in (name, *tensors)}
    for number, part in enumerate(parts):
        save_file(part, tmp_path / f"model-{number + 1}.safetensors", metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert torch.equal(weights_of(load(tmp_path, "float32")[0])[name], expected[name])
    lost = next(iter(tensors))
    index.write_text(json.dumps({"weight_map": places | {lost: "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=rf"says that 'model-1\.safetensors' has '{lost}', which it has not"):
        load(tmp_path, "float32")
    index.write_text(json.dumps({"weight_map": {key: place for key, place in places.items() if key != lost}}))
    with pytest.raises(CheckpointError, match=rf"has 1 tensors that .* does not name, such as '{lost}'"):
        load(tmp_path, "float32")
