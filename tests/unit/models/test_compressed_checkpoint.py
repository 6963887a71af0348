"""compressed-tensors checkpoints: the very weights that they stand for, and others refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec import TransformersTarget
from specdec.errors import CheckpointError, ConfigError, SpecdecError
from specdec.native import library as native
from tests.compressed_files import compressed_checkpoint
from tests.packed_checkpoints import assert_blocks_are, assert_weights_are, blocks_of, edit, load, weights_of

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
PLACE = "model.layers.1.mlp.up_proj"
PACKED, INT = "pack-quantized", "int-quantized"
KINDS: list[tuple[dict[str, Any], str]] = [
    *(({"size": size, "symmetric": same}, f"INT4_{size}") for size in (32, 64, 128) for same in (True, False)),
    ({"strategy": "channel"}, "INT4_128"),
    ({"strategy": "channel", "symmetric": False, "dtype": torch.float16}, "INT4_128"),
    ({"dtype": torch.float32, "symmetric": False}, "INT8_32"),  # scales that are no float16
    ({"form": INT}, "INT8_32"),
    ({"bits": 8, "strategy": "channel", "form": INT}, "INT8_128"),
    ({"bits": 8, "strategy": "tensor", "form": INT}, "INT8_128"),
    ({"bits": 8, "size": 32, "form": INT, "dtype": torch.float32}, "INT8_32"),
    ({"bits": 8, "size": 128}, "INT8_128"),
]


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.parametrize(("made", "blocks"), KINDS)
def test_weights_are_those_of_the_definition(made: dict[str, Any], blocks: str, tmp_path: Path) -> None:
    """In blocks, looked up or multiplied; and dequantised. In bfloat16 their blocks are the same."""
    expected = compressed_checkpoint(tmp_path, **made)
    model, told = load(tmp_path, "float32")
    assert "(compressed-tensors" in told
    assert ("the rounding of activations that its config asks for is not done" in told) == (made.get("bits") == 8)
    assert {part.format.name for kernel in blocks_of(model).values() for part in kernel.parts} == {blocks}
    assert_blocks_are(model, expected, 7 * 3, torch.float32)
    assert_blocks_are(load(tmp_path)[0], expected, 7 * 3, torch.bfloat16)
    assert_weights_are(tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("made", "_"), KINDS)
def test_the_definition_is_the_package_s_own(made: dict[str, Any], _: str, tmp_path: Path) -> None:
    """It computes in the scales' dtype, in which both are equal."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    compressed_checkpoint(tmp_path, **made)
    config = QuantizationConfig(**json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    (scheme,) = config.config_groups.values()
    tensors, place = load_file(tmp_path / "model.safetensors"), f"{PLACE}."
    own = {name.removeprefix(place): tensor for name, tensor in tensors.items() if name.startswith(place)}
    theirs = BaseCompressor.get_value_from_registry(config.format).decompress(own, scheme)["weight"]
    for in_blocks in (True, False):
        weight = weights_of(load(tmp_path, "float32", in_blocks=in_blocks)[0])[f"{PLACE}.weight"]
        assert torch.equal(weight.to(theirs.dtype), theirs)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "qwen3_moe"])
def test_all_families_run_natively(family: str, tmp_path: Path) -> None:
    """With biases, a head that is the embedding, and experts; float16 is computed in bfloat16."""
    sizes = {"head_dim": 32} if family in ("qwen3", "gemma2") else {}
    sizes |= {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    expected = compressed_checkpoint(tmp_path, family=family, size=32, tie_word_embeddings=True, **sizes)
    target = TransformersTarget.from_pretrained(tmp_path)
    assert (target.options["runner"], target.dtype) == ("native", torch.bfloat16)
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected[name].bfloat16()), name
    if family == "phi3":  # whose queries, keys and values are one tensor, as gate and up are
        assert_blocks_are(target, expected, 4 * 3, torch.bfloat16)


@needs_compiler
def test_what_blocks_do_not_hold_is_dequantised(tmp_path: Path) -> None:
    """Eight bits less a zero need nine; inputs that are no whole blocks; and modules that are not quantised."""
    kept = ("layers.0.self_attn.q_proj", "lm_head")
    sizes = {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 3, "num_key_value_heads": 1}
    for number, made in enumerate(({"bits": 8, "symmetric": False, "form": INT}, {"symmetric": True})):
        place = tmp_path / str(number)
        expected = compressed_checkpoint(place, strategy="channel", kept=kept, **made, **sizes)
        target, told = load(place, "float32")
        assert target.options["runner"] == "native"
        assert f"in blocks: {15 * number} matrices" in told  # but down_proj, and what is multiplied beside a dense one
        for name, weight in weights_of(target).items():
            assert torch.equal(weight, expected[name]), name
    with pytest.raises(ConfigError, match="activations='int8' needs quantised blocks, and none of its matrices is in"):
        load(tmp_path / "0", activations="int8")


def grouped(**changes: Any) -> dict[str, Any]:
    """A config's groups, with other settings of the weights."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | changes}}}


@needs_compiler
def test_modules_are_found_by_names_patterns_and_classes(tmp_path: Path) -> None:
    """A name comes before a pattern, and both before a class; a group's format before the config's."""
    expected = compressed_checkpoint(tmp_path)
    (right,) = grouped()["config_groups"].values()
    wrong = {**right, "weights": {**right["weights"], "group_size": 32}}
    groups = {
        "class": {**wrong, "targets": ["Linear"], "format": INT},
        "names": {**right, "targets": [rf"re:.*\.{PLACE.rpartition('.')[2]}$", "re:.*_proj"], "format": PACKED},
        "none": {"targets": ["Embedding"], "weights": None},
    }
    config = json.loads((tmp_path / "config.json").read_text())
    told = config["quantization_config"] | {"config_groups": groups, "format": "mixed-precision"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    for name, weight in weights_of(load(tmp_path, "float32")[0]).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (grouped(num_bits=8, type="float"), "weights of type 'float and 8 bits'"),
        (grouped(num_bits=4, type="float"), "weights of type 'float and 4 bits'"),
        (grouped(num_bits=3), "num_bits 3"),
        (grouped(num_bits=True), "num_bits True"),
        (grouped(strategy="block", block_structure=[64, 64]), "strategy 'block'"),
        (grouped(strategy="tensor_group"), "strategy 'tensor_group'"),
        (grouped(group_size=0), "group_size 0"),
        (grouped(group_size="64"), "group_size '64'"),
        (grouped(strategy="channel"), "group_size 64"),
        (grouped(symmetric="yes"), "symmetric 'yes'"),
        (grouped(dynamic=True), "dynamic True"),
        ({"format": "float-quantized"}, "format 'float-quantized'"),
        ({"format": "marlin-24"}, "format 'marlin-24'"),
        ({"format": ["pack-quantized"]}, r"format \['pack-quantized'\]"),
        ({"quantization_status": "frozen"}, "quantization_status 'frozen'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"sparsity_config": 1}, "sparsity_config 1"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"config_groups": {}}, "config_groups {}"),
        ({"config_groups": {"W4A16": ["Linear"]}}, r"config_groups\['W4A16'\] \['Linear'\]"),
        ({"config_groups": {"a": {"targets": "Linear", "weights": {}}}}, "targets 'Linear'"),
        ({"config_groups": {"a": {"targets": [1], "weights": {}}}}, r"targets \[1\]"),
        ({"ignore": ["re:("]}, r"has 're:\(' among its ignore, which is no pattern"),
        ({"ignore": 5}, "ignore 5"),
        ({"ignore": ["re:.*mlp.*"]}, f"'{PLACE}' in .* quantised weights, and by its .* it is ignored"),
        ({"config_groups": {"a": {"targets": ["lm_head"], "weights": {}}}}, "it is of no group; download config.json"),
    ],
)
def test_other_settings_are_refused_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Also where the package is installed: on a CPU transformers is not left what is not read here."""
    compressed_checkpoint(tmp_path, settings=settings, num_hidden_layers=2)
    with pytest.raises(
        CheckpointError, match=named.replace(PLACE, "model.layers.[01].mlp.*") if "mlp" in named else named
    ):
        load(tmp_path)


def without(kind: str) -> Any:
    return lambda tensors: tensors.pop(f"{PLACE}.{kind}")


def replaced(kind: str, tensor: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({f"{PLACE}.{kind}": tensor})


_NAN = torch.full((256, 2), torch.nan)
_ORDER = torch.arange(128, dtype=torch.int32)


@pytest.mark.few(3)
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("weight_packed"), f"1 missing, such as {PLACE}.weight"),
        (without("weight_shape"), f"1 missing, such as {PLACE}.weight_shape"),
        (without("weight_scale"), f"1 missing, such as {PLACE}.weight_scale"),
        (without("weight_zero_point"), "weight_zero_point, which symmetric=false asks for"),
        (replaced("weight_shape", torch.tensor([128, 256])), rf"{PLACE}.weight, \[128, 256\] in place of \[256, 128\]"),
        (replaced("weight_shape", torch.tensor([-1, 1 << 40])), rf"{PLACE}.weight, \[-1, {1 << 40}\] in place of"),
        (replaced("weight_shape", torch.tensor([256, 128, 1])), r"weight_shape, \[3\] in place of \[2\]"),
        (replaced("weight_shape", torch.tensor([256.0, 128.0])), "of another dtype, such as .*weight_shape, float32"),
        (
            replaced("weight_packed", torch.zeros(256, 8, dtype=torch.int32)),
            r"\[256, 8\] .* by its quantization_config",
        ),
        (replaced("weight_packed", torch.zeros(256, 16)), "of another dtype, such as .*weight_packed, float32"),
        (replaced("weight_scale", torch.zeros(256, 1)), r"weight_scale, \[256, 1\] in place of \[256, 2\] by its"),
        (
            replaced("weight_scale", torch.zeros(256, 2, dtype=torch.int8)),
            "another dtype, such as .*weight_scale, int8",
        ),
        (replaced("weight_scale", _NAN), f"'{PLACE}.weight_scale' in .* holds NaN or infinity"),
        (replaced("weight_zero_point", torch.zeros(256, 9, dtype=torch.int8)), r"weight_zero_point, \[256, 9\]"),
        (
            replaced("weight_zero_point", torch.full((256, 2), 8, dtype=torch.int8)),
            "has 8, and codes of 4 bits are from",
        ),
        (replaced("weight_g_idx", _ORDER % 2), "weight_g_idx' in .* side by side .* actorder 'weight'"),
        (replaced("weight_g_idx", _ORDER[:9]), r"weight_g_idx, \[9\] in place of \[128\]"),
        (replaced("weight", torch.zeros(256, 128)), f"'{PLACE}' in .* has both weight and weight_packed"),
        (replaced("bias", torch.ones(256)), f"1 extra, such as {PLACE}.bias"),
        (replaced("input_scale", torch.ones(1)), f"1 extra, such as {PLACE}.input_scale"),
    ],
)
def test_other_tensors_are_refused_by_name(in_blocks: bool, change: Any, named: str, tmp_path: Path) -> None:
    compressed_checkpoint(tmp_path, symmetric=False)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path, in_blocks=in_blocks)


@needs_compiler
def test_orders_that_change_nothing_and_plain_zeros_are_read(tmp_path: Path) -> None:
    """As older versions of the package wrote them; and scales of activations, which are not rounded."""
    expected = compressed_checkpoint(tmp_path, settings={"kv_cache_scheme": {"num_bits": 8, "type": "float"}})

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{PLACE}.weight_g_idx"] = torch.full((128,), -1, dtype=torch.int32)
        tensors[f"{PLACE}.weight_zero_point"] = torch.zeros(256, 2, dtype=torch.int8)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)

    edit(tmp_path, change)
    target, told = load(tmp_path, "float32")
    assert "the rounding of keys and values that its config asks for is not done" in told
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected[name]), name
    dense = TransformersTarget.from_pretrained(tmp_path, dtype="float64").describe()["model"]["weights"]
    assert str(dense).endswith("keys and values that its config asks for is not done")


def test_dense_weights_beside_such_a_config_are_refused(tmp_path: Path) -> None:
    compressed_checkpoint(tmp_path, kept=("weight",))
    with pytest.raises(CheckpointError, match="none of its tensors is a weight_packed or weight_scale; remove"):
        load(tmp_path)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 60), marks=pytest.mark.slow)])
def test_files_with_other_bytes_are_read_or_refused(seeds: range, tmp_path: Path) -> None:
    """In the table of tensors, in the config, and files that end early."""
    compressed_checkpoint(tmp_path, num_hidden_layers=1, symmetric=False)
    file, settings, refused = tmp_path / "model.safetensors", tmp_path / "config.json", list[str]()
    data, config = file.read_bytes(), settings.read_text()
    begin = config.index("quantization_config")
    for seed in seeds:
        draw = random.Random(seed)
        broken, told = bytearray(data), [*config]
        if seed % 2:
            broken[draw.randrange(8, 3000)] = draw.randrange(256)
        else:
            told[draw.randrange(begin, len(told))] = draw.choice('0123459ae"{}[]:,-n ')
        file.write_bytes(broken[: draw.randrange(len(data))] if seed % 8 == 7 else broken)
        settings.write_text("".join(told))
        try:
            load(tmp_path)
        except SpecdecError as error:
            refused.append(str(error))
    assert all(str(tmp_path) in error for error in refused)
    assert len(refused) > len(seeds) / 4
