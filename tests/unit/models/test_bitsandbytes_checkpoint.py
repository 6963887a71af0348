"""bitsandbytes checkpoints: the very weights that they stand for, and no text changed by a drafter.

The expected weights are made by the format's definition, in `tests/bitsandbytes_files.py`. A recorded checkpoint, which
bitsandbytes 0.50.2 quantised and dequantised, shows that this definition is the package's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdec import TransformersTarget
from specdec.errors import CheckpointError, ConfigError
from specdec.native import library as native
from tests.bitsandbytes_files import bitsandbytes_checkpoint
from tests.packed_checkpoints import assert_blocks_are, assert_weights_are, blocks_of, edit, load, weights_of

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
PROMPT = (3, 9, 4, 3, 9, 4, 11, 3, 9)
PLACE = "model.layers.1.mlp.up_proj"
STATE = f"{PLACE}.weight.quant_state.bitsandbytes__nf4"
KINDS = [
    *(("nf4", size, nested) for size in (32, 64, 128, 4096) for nested in (False, True)),
    ("fp4", 64, True),
    ("int8", 0, False),
]


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(("kind", "size", "nested"), KINDS)
def test_weights_are_those_of_the_definition(kind: str, size: int, nested: bool, tmp_path: Path) -> None:
    """In blocks, looked up or multiplied; and dequantised. In bfloat16 their blocks are the same."""
    expected = bitsandbytes_checkpoint(tmp_path, kind=kind, size=size, nested=nested)
    model, told = load(tmp_path, "float32")
    named = "int8, a scale for each output" if kind == "int8" else f"{kind.upper()} in groups of {size}"
    assert told.startswith(f"{named} (bitsandbytes) in blocks: 21 matrices, ")
    assert_blocks_are(model, expected, 7 * 3, torch.float32)
    assert_blocks_are(load(tmp_path)[0], expected, 7 * 3, torch.bfloat16)
    assert_weights_are(tmp_path, expected)


@pytest.mark.slow
@needs_compiler
def test_the_definition_is_the_package_s_own(tmp_path: Path) -> None:
    """Recorded: the state of `quantize_4bit(torch.randn(16, 64) / 20, blocksize=64, ...)`, and what `dequantize_4bit`
    makes of it in float32, on a CPU.
    """
    recorded = load_file(Path(__file__).with_name("bitsandbytes_0.50.2.safetensors"))
    bitsandbytes_checkpoint(tmp_path, hidden_size=64, intermediate_size=16)
    kinds = ("nf4", "nf4_nested", "fp4_nested")
    for number, kind in enumerate(kinds):
        own = {
            name.removeprefix(f"{kind}."): tensor for name, tensor in recorded.items() if name.startswith(f"{kind}.")
        }
        expected, place = own.pop("dequantised"), f"model.layers.{number}.mlp.up_proj.weight"

        def put(tensors: dict[str, torch.Tensor], place: str = place, own: dict[str, torch.Tensor] = own) -> None:
            for name in [name for name in tensors if name.startswith(place)]:
                del tensors[name]
            tensors.update({f"{place}{name}": tensor for name, tensor in own.items()})

        edit(tmp_path, put)
        for in_blocks in (True, False):
            model, _ = load(tmp_path, "float32", in_blocks=in_blocks)
            assert torch.equal(weights_of(model)[place], expected), (kind, in_blocks)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(("kind", "size"), [("nf4", 64), ("int8", 0)])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_all_families_run_natively(family: str, kind: str, size: int, tmp_path: Path) -> None:
    """With biases, and a head that is the embedding; float16 is computed in bfloat16."""
    sizes = {"head_dim": 32} if family in ("qwen3", "gemma2", "gemma3") else {}
    expected = bitsandbytes_checkpoint(tmp_path, kind=kind, size=size, family=family, tie_word_embeddings=True, **sizes)
    target = TransformersTarget.from_pretrained(tmp_path)
    assert (target.options["runner"], target.dtype) == ("native", torch.bfloat16)
    assert "(bitsandbytes) in blocks: 21 matrices" in str(target.describe()["model"]["weights"])
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected[name].bfloat16()), name


@needs_compiler
@pytest.mark.parametrize(("kind", "size"), [("nf4", 64), ("int8", 0)])
def test_stacked_matrices_stay_quantised(kind: str, size: int, tmp_path: Path) -> None:
    """Phi-3's queries, keys and values, and gate and up, which are one tensor each."""
    expected = bitsandbytes_checkpoint(tmp_path, kind=kind, size=size, family="phi3")
    assert_blocks_are(load(tmp_path, "float32")[0], expected, 4 * 3, torch.float32)
    assert_weights_are(tmp_path, expected)


@needs_compiler
def test_what_is_not_quantised_stays_dense(tmp_path: Path) -> None:
    """`llm_int8_skip_modules`: a layer's query alone, and an MLP. A matrix whose inputs are no whole blocks is
    dequantised. The head is quantised, in blocks of 32 as its inputs are not a multiple of 64.
    """
    kept = ("layers.0.self_attn.q_proj", "layers.1.mlp")
    sizes = {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 3, "num_key_value_heads": 1}
    expected = bitsandbytes_checkpoint(tmp_path, kept=kept, settings={"llm_int8_skip_modules": [*kept]}, **sizes)
    target = TransformersTarget.from_pretrained(tmp_path, dtype="float32")
    assert target.options["runner"] == "native"
    model, told = load(tmp_path, "float32")
    packed = blocks_of(model)
    assert packed["lm_head.weight"].parts[0].format.name == "NF4_32"
    assert len(packed) == 14  # not every down_proj, nor what is multiplied together with a dense matrix
    assert "14 matrices" in told
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, expected[name]), name


@needs_compiler
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_codes_are_bytes_whatever_dtype_stores_them(storage: torch.dtype, tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`: bytes viewed as another dtype, as shards of a training need it."""
    expected = bitsandbytes_checkpoint(tmp_path, storage=storage)
    model, _ = load(tmp_path, "float32")
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("there", [False, True])
def test_a_config_alone_quantises_nothing(
    bits: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers, with the package or without, takes dense weights beside such a config for quantised ones."""
    if there:
        monkeypatch.setattr("specdec.decoder.weights.quantised.find_spec", lambda name: name)
    bitsandbytes_checkpoint(tmp_path, kind="int8" if bits == 8 else "nf4", kept=("weight",))
    for options in ({}, {"dtype": "float16"}, {"in_blocks": False}):
        with pytest.raises(CheckpointError, match="none of its tensors is a quant_state or SCB; remove"):
            load(tmp_path, **options)


def test_codes_that_are_no_integers_are_not_multiplied_with_bytes(tmp_path: Path) -> None:
    bitsandbytes_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"activations='int8' (multiplies integers|needs quantised blocks)"):
        load(tmp_path, activations="int8")


def told_of(changes: dict[str, Any]) -> Any:
    """A change of what one weight's JSON says."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        told = {**json.loads(bytes(tensors[STATE].tolist())), **changes}
        tensors[STATE] = torch.tensor([*json.dumps(told).encode()], dtype=torch.uint8)

    return change


def renamed(old: str, new: str) -> Any:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, tensor: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.few(2)
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(f"{PLACE}.weight"), f"1 missing, such as {PLACE}.weight"),
        (without(f"{PLACE}.weight.absmax"), f"1 missing, such as {PLACE}.weight.absmax"),
        (without(f"{PLACE}.weight.quant_map"), f"1 missing, such as {PLACE}.weight.quant_map"),
        (without(f"{PLACE}.weight.nested_quant_map"), f"1 missing, such as {PLACE}.weight.nested_quant_map"),
        (without(f"{PLACE}.weight.nested_absmax"), f"1 of another dtype, such as {PLACE}.weight.absmax, uint8"),
        (without(STATE), f"1 misshapen, such as {PLACE}.weight"),
        (replaced(f"{PLACE}.weight", torch.zeros(99, 1, dtype=torch.uint8)), r"up_proj.weight, \[99, 1\] in place of"),
        (replaced(f"{PLACE}.weight.absmax", torch.zeros(9, dtype=torch.uint8)), r"absmax, \[9\] .* by its quant_state"),
        (replaced(f"{PLACE}.weight.nested_absmax", torch.zeros(9)), r"nested_absmax, \[9\] in place of \[2\]"),
        (replaced(f"{PLACE}.weight.nested_quant_map", torch.zeros(9)), r"nested_quant_map, \[9\] in place of \[256\]"),
        (replaced(f"{PLACE}.weight.quant_map", torch.linspace(-1, 1, 16)), "quant_map' in .* other values than nf4"),
        (replaced(f"{PLACE}.weight.extra", torch.zeros(1)), f"1 extra, such as {PLACE}.weight.extra"),
        (renamed(STATE, STATE.replace("nf4", "nf5")), "nf5' in .* says quant_type 'nf4', and it must be nf4 or fp4"),
        (renamed(STATE, STATE.replace("nf4", "fp4")), "fp4' in .* says quant_type 'nf4', and it must be nf4 or fp4"),
        (replaced(STATE, torch.zeros(9, dtype=torch.uint8)), "cannot read '.*nf4' in .*; download"),
        (replaced(STATE, torch.tensor([*b"[" * 9999], dtype=torch.uint8)), "cannot read '.*nf4' in .*; download"),
        (replaced(STATE, torch.tensor([*b"[1]"], dtype=torch.uint8)), r"holds \[1\], and it must be a JSON object"),
        (replaced(STATE, torch.zeros(9)), "1 of another dtype, such as .*nf4, float32"),
        (told_of({"quant_type": "af4"}), "says quant_type 'af4'"),
        (told_of({"quant_type": [1]}), r"says quant_type \[1\]"),
        (told_of({"blocksize": 48}), "says blocksize 48, and it must be one of 32, 64"),
        (told_of({"blocksize": None}), "says blocksize None"),
        (told_of({"blocksize": 128}), r"weight.absmax, \[512\] in place of \[256\] by its quant_state"),
        (
            told_of({"shape": [128, 256]}),
            rf"1 misshapen, such as {PLACE}.weight, \[128, 256\] in place of \[256, 128\]",
        ),
        (told_of({"nested_blocksize": 0}), "says nested_blocksize 0"),
        (told_of({"nested_dtype": "float16"}), "says nested_dtype 'float16', and it must be float32"),
        (told_of({"nested_offset": "1"}), "says nested_offset '1', and it must be a finite number"),
        (told_of({"nested_offset": float("nan")}), "says nested_offset nan, and it must be a finite number"),
    ],
)
def test_other_tensors_are_refused_by_name(in_blocks: bool, change: Any, named: str, tmp_path: Path) -> None:
    bitsandbytes_checkpoint(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path, in_blocks=in_blocks)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.slow)])
def test_files_with_other_bytes_are_read_or_refused(seeds: range, tmp_path: Path) -> None:
    """In the table of tensors, and in what weights' JSON say."""
    bitsandbytes_checkpoint(tmp_path, num_hidden_layers=1)
    file, refused = tmp_path / "model.safetensors", list[str]()
    data = file.read_bytes()
    told = [at for at in range(len(data)) if data.startswith(b'{"quant_type"', at)]
    for seed in seeds:
        random = np.random.default_rng(seed)
        places = [random.integers(8, 4000), *random.choice(told, 3) + random.integers(0, 150, 3)]
        broken = bytearray(data)
        for place in places[seed % 2 : None if seed % 2 else 1]:
            broken[place] = random.integers(256)
        file.write_bytes(broken[: random.integers(len(data))] if seed % 8 == 7 else broken)
        try:
            load(tmp_path)
        except CheckpointError as error:
            refused.append(str(error))
    assert all(str(tmp_path) in error for error in refused)
    assert len(refused) > len(seeds) / 4


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(f"{PLACE}.SCB"), f"1 of another dtype, such as {PLACE}.weight, int8"),
        (without(f"{PLACE}.weight"), f"1 missing, such as {PLACE}.weight"),
        (replaced(f"{PLACE}.SCB", torch.zeros(9)), r"SCB, \[9\] in place of \[256\]"),
        (replaced(f"{PLACE}.SCB", torch.zeros(256, dtype=torch.int8)), "1 of another dtype, such as .*SCB, int8"),
        (replaced(f"{PLACE}.weight_format", torch.tensor(2, dtype=torch.uint8)), "weight_format' in .* another order"),
        (replaced(f"{PLACE}.weight", torch.zeros(256, 128)), "1 of another dtype, such as .*weight, float32"),
    ],
)
def test_other_tensors_of_8_bits_are_refused_by_name(change: Any, named: str, tmp_path: Path) -> None:
    bitsandbytes_checkpoint(tmp_path, kind="int8")
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)
