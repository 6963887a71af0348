"""Checkpoints in folders: what was not fetched, or would be loaded as another model, is refused by its cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import Engine
from specdec.errors import CheckpointError
from specdec.models.live_model import load_model
from specdec.models.loading import embedded_model
from specdec.models.tokenizer import load_tokenizer


def load(folder: Path) -> Any:
    return load_model(folder, dtype="float32", device=None, device_map=None, trust_remote_code=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    shutil.copytree(embedded_model(), found)
    return found


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_files_that_git_lfs_did_not_fetch(name: str, folder: Path) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match=rf"{name}' is a pointer of git-lfs.*`git lfs pull`"):
        Engine.from_pretrained(folder)


def test_integers_are_no_weights(folder: Path) -> None:
    file, name = folder / "model.safetensors", "model.layers.3.mlp.up_proj.weight"
    tensors = load_file(file)
    tensors[name] = (tensors[name] * 100).to(torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"'{name}' in '.*' holds integers \(I8\).*says nothing of quantisation"):
        load(folder)


def test_an_adapter_alone(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))
    with pytest.raises(CheckpointError, match=r"holds '.*adapter_config.json', .* load base and adapter with peft"):
        load(tmp_path)


def test_sentencepiece_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2")
    monkeypatch.setattr("specdec.models.tokenizer.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"is SentencePiece's.*pip install sentencepiece protobuf"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "sundry"}, "does not have its architecture: install a newer one"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "its weights are quantised by 'aqlm'"),
    ],
)
def test_what_transformers_does_not_load(config: dict[str, Any], message: str, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(CheckpointError, match=message):
        load(folder)
