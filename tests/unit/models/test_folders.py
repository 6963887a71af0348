"""Checkpoints in folders: what was not fetched, or would be loaded as another model, is refused by its cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine
from specdec.errors import CheckpointError
from specdec.models.live_model import load_model
from specdec.models.loading import embedded_model
from specdec.models.tokenizer import load_tokenizer
from tests.packed_checkpoints import edit


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


@pytest.mark.parametrize(
    ("dtype", "named"),
    [(torch.int8, r"integers \(I8\)"), (torch.float8_e4m3fn, r"floats of 8 bits \(F8_E4M3\)")],
)
def test_bytes_are_no_weights(dtype: torch.dtype, named: str, folder: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: (tensors[name] * 100).to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"'{name}' in '.*' holds {named}.*says nothing of quantisation"):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("LlamaForCausalLMEagle3", lambda tensors: None, "is a draft head .LlamaForCausalLMEagle3. and no model"),
        (
            "LlamaForCausalLM",
            lambda tensors: tensors.update({"fc.weight": torch.zeros(8, 16)}),
            "is a draft head .LlamaForCausalLM. and no model: give the model, and the head as its drafter's",
        ),
        ("LlamaModel", lambda tensors: tensors.pop("lm_head.weight", None), "is a LlamaModel, which makes embeddings"),
    ],
)
def test_folders_of_no_language_model(kind: str, change: Any, named: str, folder: Path) -> None:
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "architectures": [kind], "tie_word_embeddings": False}))
    edit(folder, change)
    with pytest.raises(CheckpointError, match=named):
        Engine.from_pretrained(folder)


def test_pickles_are_not_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"are pickles \(\*\.bin\).*: convert them to safetensors"):
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
        (
            {"quantization_config": {"quant_method": "modelopt"}},
            "by 'modelopt', which neither specdec nor transformers",
        ),
        ({"quantization_config": {"quant_method": 5}}, "by 5, which neither specdec nor transformers"),
    ],
)
def test_what_transformers_does_not_load(config: dict[str, Any], message: str, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(CheckpointError, match=message):
        load(folder)
