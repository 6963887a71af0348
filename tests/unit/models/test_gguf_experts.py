"""GGUF files with experts: their blocks stay what they are, and rows share what is read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine, TransformersTarget
from specdec.errors import CheckpointError
from specdec.native import library as native
from specdec.runners.block_weight import BlockWeight
from tests.models import logits_of
from tests.packed_checkpoints import weights_of
from tests.quantised_files import quantised_file

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
FAMILIES = ("qwen3moe", "mixtral")
MIXED = ("Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_0")
PROMPT = (3, 9, 4, 3, 9, 4, 11, 3, 9)
TEXT = (PROMPT * 4)[:33]


def target_of(file: Path, **options: Any) -> Any:
    return TransformersTarget.from_pretrained(file, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_the_dequantised_model(family: str, tmp_path: Path) -> None:
    """In float32, whose blocks stand for the very weights that are dequantised."""
    file = quantised_file(tmp_path / "small.gguf", MIXED, family=family)
    native_target, dense = target_of(file, dtype="float32"), target_of(file, dtype="float32", execution="modules")
    assert native_target.options["runner"] == "native"
    assert str(dense.describe()["model"]["weights"]).startswith("dequantised: another way to run its layers was asked")
    experts = [kernel for names, kernel in native_target.executor.kernels() if "experts" in names[0]]
    assert len(experts) >= 3 * 2 * 4
    assert all(isinstance(kernel, BlockWeight) for kernel in experts)
    texts = [Engine(target, None, "lookahead").generate(PROMPT, 30).token_ids for target in (native_target, dense)]
    assert texts[0] == texts[1]
    told = native_target.describe()
    assert "in the same call: 2 of" in str(told["execution"]["experts"])
    assert told["model"]["parameters"] == dense.describe()["model"]["parameters"]


@pytest.mark.few(1)
@pytest.mark.parametrize("activations", ["default", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_s_bits_do_not_depend_on_the_rows_beside_it(
    family: str, threads: int, activations: str, tmp_path: Path
) -> None:
    target = target_of(quantised_file(tmp_path / "small.gguf", MIXED, family=family), activations=activations)
    alone, before = logits_of(target, TEXT, 1), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for chunk in (2, 3, 4, 5, 8, 9, 16, 17, 32, 33):
            assert torch.equal(logits_of(target, TEXT, chunk), alone), chunk
    finally:
        torch.set_num_threads(before)


@pytest.mark.few(1)
@pytest.mark.parametrize("kinds", [("F16",), ("Q8_0", "F32"), ("F32", "Q4_0", "Q4_0")])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_other_kinds_are_held_as_before(family: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Those that are not all in blocks are dense, and hold what the file says."""
    file = quantised_file(tmp_path / "small.gguf", kinds, family=family)
    target, dense = target_of(file, dtype="float32"), target_of(file, dtype="float32", execution="modules")
    assert target.options["runner"] == "native"
    own, theirs = weights_of(target), weights_of(dense)
    assert own.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in own.items())


def test_more_experts_of_a_row_than_there_are_are_refused(tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf", family="mixtral")
    blob = file.read_bytes()
    at = blob.index(b"llama.expert_used_count") + len(b"llama.expert_used_count") + 4  # behind the number's type
    file.write_bytes(blob[:at] + b"\x05" + blob[at + 1 :])
    for execution in ("auto", "modules"):
        with pytest.raises(CheckpointError, match="has 4 experts, of which a token goes to 5"):
            target_of(file, execution=execution)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_without_some_experts_is_refused_by_name(family: str, tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf", family=family)
    blob = file.read_bytes()
    file.write_bytes(blob.replace(b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_up_expz.weight"))
    with pytest.raises(CheckpointError, match=r"missing, such as blk\.1\.ffn_up_exps\.0\.weight"):
        target_of(file)
    count = f"{'llama' if family == 'mixtral' else family}.expert_count".encode()
    at = blob.index(count) + len(count) + 4  # behind the number's type
    file.write_bytes(blob[:at] + b"\x02" + blob[at + 1 :])
    with pytest.raises(CheckpointError, match=r"misshapen, such as blk\.0\.ffn_gate_inp\.weight"):
        target_of(file)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_spread_over_devices(family: str, tmp_path: Path) -> None:
    file = quantised_file(tmp_path / "small.gguf", MIXED, family=family)
    spread, whole = (
        target_of(file, dtype="float32", **more) for more in ({"device_map": "auto"}, {"execution": "modules"})
    )
    assert spread.describe()["model"]["weights"] == "dequantised: it is spread"
    assert torch.equal(logits_of(spread, TEXT), logits_of(whole, TEXT))
