"""Checkpoints: tensors by any of their names, read as they are asked for; what does not fit is refused unread."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.decoder.families import FAMILIES
from specdec.decoder.names import Weight
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.decoder.weights.safetensors import SafetensorsSource
from specdec.decoder.weights.source import TensorSource
from specdec.errors import CheckpointError
from tests import models
from tests.decoders import checkpoint_of, spec_of_config

Tensors = dict[str, torch.Tensor]


class Unread(TensorSource):
    """Tensors of which none may be read."""

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


def saved(family: str, folder: Path, **changes: Any) -> tuple[Any, Tensors]:
    """A model's config, and its tensors as it is saved."""
    model = models.new_model(family, torch.float32, **changes)
    model.save_pretrained(folder)
    return model.config, load_file(folder / "model.safetensors")


def opened(config: Any, tensors: Tensors, kind: type[TensorSource] = TensorSource) -> Checkpoint:
    return Checkpoint(spec_of_config(config), FAMILIES[config.model_type].names, kind(tensors, "'here'"))


def equal(one: Checkpoint, other: Checkpoint, weights: Sequence[Weight]) -> bool:
    return all(torch.equal(one.read(weight), other.read(weight)) for weight in weights)


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_a_decoder_is_found_behind_any_prefix(prefix: str, tmp_path: Path) -> None:
    """As in a base model's checkpoint, and in those of images and texts, whose other tensors are left."""
    config, tensors = saved("gemma3", tmp_path)
    moved = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    if prefix:
        moved |= {"vision_tower.embeddings.weight": torch.ones(2), "multi_modal_projector.x": torch.ones(2)}
    if prefix.startswith("language_model."):
        moved["language_model.lm_head.weight"] = moved.pop("lm_head.weight")
    one, other = opened(config, tensors), opened(config, moved)
    assert equal(one, other, [Weight("embedding"), Weight("head"), Weight("norm"), Weight("after.mlp", 2)])


def test_experts_are_one_by_one_or_fused(tmp_path: Path) -> None:
    model = models.new_model("mixtral", torch.float32)
    fused, apart = checkpoint_of(model), checkpoint_of(model, tmp_path)
    for part in ("experts.gate_up", "experts.down"):
        each = [[torch.cat([*tensors]) for tensors in one.experts(1, part)] for one in (fused, apart)]
        assert len(each[0]) == 4
        assert all(map(torch.equal, *each))
    assert equal(fused, apart, [Weight("experts.router", 2)])


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    config, tensors = saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"model-{1 + number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in sorted({*places.values()}):
        save_file({name: tensors[name] for name, where in places.items() if where == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    names = FAMILIES["llama"].names
    found = Checkpoint(spec_of_config(config), names, SafetensorsSource(tmp_path))
    assert equal(found, opened(config, tensors), [Weight("attention.k", 1), Weight("mlp.down", 2), Weight("norm")])
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda own: own.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            "1 missing, such as model.layers.1.mlp.ex",
        ),
        (lambda own: own.pop("model.norm.weight"), "missing, such as model.norm.weight"),
        (
            lambda own: own.update({"lm_head.weight": torch.ones(3, 2)}),
            r"1 misshapen, such as lm_head.weight, \[3, 2\]",
        ),
        (lambda own: own.update({"model.layers.9.x": torch.ones(1)}), "1 extra, such as model.layers.9.x"),
        (
            lambda own: own.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            "1 extra, such as model.lay",
        ),
        (
            lambda own: own.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(64, 32, dtype=torch.int8)}),
            "1 of another dtype, such as model.layers.0.self_attn.q_proj.weight, int8",
        ),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_read(change: Any, says: str, tmp_path: Path) -> None:
    config, tensors = saved("qwen3_moe", tmp_path)
    opened(config, tensors, Unread)
    change(tensors)
    with pytest.raises(CheckpointError, match=rf"'here' does not fit Qwen3MoeForCausalLM: tensors .*{says}"):
        opened(config, tensors, Unread)


def test_a_broken_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no 'model.safetensors'"):
        SafetensorsSource(tmp_path)
    saved("llama", tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match=r"cannot read .*; download the checkpoint anew"):
        SafetensorsSource(tmp_path)


def test_what_older_files_have_beside_is_left(tmp_path: Path) -> None:
    config, tensors = saved("llama", tmp_path)
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "mtp.norm.weight": torch.ones(4)}
    opened(config, tensors, Unread)


def test_a_tied_head_is_the_embedding_or_its_own_as_the_tensors_have_it(tmp_path: Path) -> None:
    config, tensors = saved("llama", tmp_path, tie_word_embeddings=True)
    name = "model.embed_tokens.weight"
    assert opened(config, tensors, Unread).spec.head.tied
    twice = opened(config, {**tensors, "lm_head.weight": tensors[name].clone()})
    assert twice.spec.head.tied
    assert not twice.has(Weight("head"))
    other = opened(config, {**tensors, "lm_head.weight": tensors[name] + 1})
    assert not other.spec.head.tied
    assert torch.equal(other.read(Weight("head")), tensors[name] + 1)
    alone = {("lm_head.weight" if one == name else one): tensor for one, tensor in tensors.items()}
    assert torch.equal(opened(config, alone).read(Weight("embedding")), tensors[name])
