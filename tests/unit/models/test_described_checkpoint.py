"""Folders whose files or settings could be read in two ways are read as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec import TransformersTarget
from specdec.errors import SpecdecWarning, TargetError
from tests import models

PROMPT = (3, 9, 4, 3, 9, 4, 11)


def saved(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> None:
    models.new_model(family, dtype).save_pretrained(folder, **options)


def configured(folder: Path, **changes: Any) -> None:
    place = folder / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **changes}))


def rewritten(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def assert_as_transformers(folder: Path, runner: str = "fused") -> None:
    """Its dtype and logits are those of the model that transformers loads."""
    target = TransformersTarget.from_pretrained(folder, execution="fused" if runner == "fused" else "auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert target.options["runner"] == runner
    assert target.dtype is model.dtype
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(models.logits_of(target, PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_as_transformers(tmp_path)
    other = models.new_model("llama", torch.float32, seed=2)
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert_as_transformers(tmp_path)
    for shard in tmp_path.glob("model-*"):
        shard.unlink()
    assert_as_transformers(tmp_path)


def test_shards_may_be_in_a_folder_of_their_own(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    (tmp_path / "w").mkdir()
    for shard in {*told["weight_map"].values()}:
        (tmp_path / shard).rename(tmp_path / "w" / shard)
    told["weight_map"] = {name: f"w/{shard}" for name, shard in told["weight_map"].items()}
    index.write_text(json.dumps(told))
    assert_as_transformers(tmp_path)


def test_a_named_file_of_weights_is_read(tmp_path: Path) -> None:
    saved(tmp_path)
    models.new_model("llama", torch.float32, seed=2).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other.safetensors")
    configured(tmp_path, transformers_weights="other.safetensors")
    target = TransformersTarget.from_pretrained(tmp_path)
    assert target.options["runner"] == "modules"
    assert "its config names the file of its weights, 'other.safetensors'" in str(target.describe())


@pytest.mark.parametrize("first", ["lm_head.weight", "model.norm.weight"])
def test_without_a_dtype_the_first_tensor_has_it(first: str, tmp_path: Path) -> None:
    """In the order of the file."""
    saved(tmp_path)
    configured(tmp_path, dtype=None)
    rewritten(tmp_path / "model.safetensors", lambda tensors: tensors.update({first: tensors[first].bfloat16()}))
    target = TransformersTarget.from_pretrained(tmp_path, execution="fused")
    assert target.dtype is transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype


def test_an_edit_of_the_file_changes_no_target(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    targets = [TransformersTarget.from_pretrained(tmp_path, execution=name) for name in ("fused", "auto")]
    before = [models.logits_of(target, PROMPT) for target in targets]
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(size // 4)
        stream.write(bytes(size // 2))
    for target, logits in zip(targets, before, strict=True):
        assert torch.equal(models.logits_of(target, PROMPT), logits)


def test_a_decoder_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    configured(tmp_path, is_causal=False)
    with pytest.raises(TargetError, match="over a tree are not those of each path"):
        TransformersTarget.from_pretrained(tmp_path)


def test_a_cap_that_its_class_does_not_know_is_none(tmp_path: Path) -> None:
    saved(tmp_path, "gemma")
    configured(tmp_path, final_logit_softcapping=0.5)
    with pytest.warns(SpecdecWarning, match=r"says final_logit_softcapping 0\.5, which its class does not know"):
        assert_as_transformers(tmp_path)


def test_a_mixture_without_experts_is_dense(tmp_path: Path) -> None:
    """As its class makes it."""
    config = models.new_model("qwen3_moe").config
    config.num_experts = 0
    transformers.Qwen3MoeForCausalLM(config).float().save_pretrained(tmp_path)
    assert_as_transformers(tmp_path)


def test_a_head_is_tied_where_the_whole_model_s_config_says_so(tmp_path: Path) -> None:
    text = models.new_model("gemma3", torch.float32).config.to_dict() | {"tie_word_embeddings": False}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config: Any = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, tie_word_embeddings=True
    )
    transformers.Gemma3ForConditionalGeneration(config).float().save_pretrained(tmp_path)
    target = TransformersTarget.from_pretrained(tmp_path, execution="fused")
    assert target.options["runner"] == "fused"
    model: Any = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(models.logits_of(target, PROMPT), expected, rtol=1e-4, atol=1e-4)
