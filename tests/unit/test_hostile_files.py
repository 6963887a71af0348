"""Model folders that are broken, incomplete or out of all measure: each is refused, by the file, and with the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import Engine, SpecdecError, TransformersTarget
from specdec.errors import CheckpointError, NumericalError, TargetError
from specdec.pretrained import embedded_model
from tests.models import new_model

NAN, INF = float("nan"), float("inf")
DIGITS = "9" * 5000
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    model = new_model("llama", torch.float32, vocab_size=2048, num_hidden_layers=2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model() / name, folder / name)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def refusal(folder: Path, kind: type[SpecdecError] | tuple[type[SpecdecError], ...]) -> str:
    with pytest.raises(kind) as caught:
        Engine.from_pretrained(folder, policy="off")
    message = str(caught.value)
    assert len(message) < 1000
    return message


def test_the_good_one_is_good(good: Path) -> None:
    assert len(Engine.from_pretrained(good, policy="off").generate("import os", 3).token_ids) == 3


BROKEN = {
    "nothing": "",
    "half": '{"a": ',
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "a text": '"x"',
    "deep": "[" * 100_000,
    "deep and whole": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "digits": f'{{"vocab_size": {DIGITS}, "eos_token_id": {DIGITS}, "weight_map": {DIGITS}, "version": {DIGITS}}}',
    "binary": "\x00\x01\x02",
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_json_of_its_kind(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    message = refusal(folder, CheckpointError)
    assert str(folder) in message
    assert "tokenizer" in message if name.startswith("tokenizer") else name in message, message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_not_utf_8(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b'{"a": "\xff\xfe"}')
    assert str(folder) in refusal(folder, CheckpointError)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_where_a_file_should_be(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    assert str(folder) in refusal(folder, CheckpointError)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_leads_nowhere(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "gone")
    assert str(folder) in refusal(folder, CheckpointError)


def edited(folder: Path, changes: dict[str, Any], name: str = "config.json") -> None:
    values = json.loads((folder / name).read_text())
    values.update(changes)
    (folder / name).write_text(json.dumps(values))


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"num_key_value_heads": 3}, ""),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
    ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
    ({"num_hidden_layers": None}, ""),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"num_hidden_layers": 3}, "missing"),
    ({"num_hidden_layers": 1}, "extra"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": -32}, "hidden_size is -32"),
    ({"hidden_size": 10**9}, ""),
    ({"hidden_size": 10**30}, ""),
    ({"hidden_size": "32"}, "hidden_size is '32'"),
    ({"hidden_size": [32]}, ""),
    ({"hidden_size": 33}, ""),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"head_dim": -8}, "head_dim is -8"),
    ({"head_dim": 7}, ""),
    ({"head_dim": "x"}, ""),
    ({"intermediate_size": 0}, ""),
    ({"intermediate_size": -1}, ""),
    ({"intermediate_size": 10**9}, ""),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"vocab_size": -5}, "vocab_size is -5"),
    ({"vocab_size": 10**9}, ""),
    ({"vocab_size": 100}, ""),
    ({"vocab_size": None}, ""),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
    ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
    ({"max_position_embeddings": 1.5}, "max_position_embeddings is 1.5"),
    ({"max_position_embeddings": None}, ""),
    ({"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1.0}}, ""),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, ""),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, ""),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, ""),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": NAN}}, ""),
    ({"rope_parameters": 3}, ""),
    ({"rope_parameters": [1]}, ""),
    ({"rms_norm_eps": "x"}, ""),
    ({"rms_norm_eps": NAN}, ""),
    ({"hidden_act": "nosuch"}, ""),
    ({"hidden_act": 3}, ""),
    ({"torch_dtype": "nosuch", "dtype": "nosuch"}, ""),
    ({"dtype": "int8"}, ""),
    ({"dtype": 3}, ""),
    ({"model_type": 3}, ""),
    ({"model_type": None}, ""),
    ({"model_type": "bert"}, ""),
    ({"model_type": "t5"}, ""),
    ({"model_type": "gpt2"}, ""),
    ({"model_type": "clip"}, ""),
    ({"model_type": "whisper"}, ""),
    ({"model_type": "mamba"}, ""),
    ({"model_type": "opt"}, ""),
    ({"architectures": 3}, ""),
    ({"layer_types": 3}, ""),
    ({"layer_types": ["nosuch"] * 2}, ""),
    ({"quantization_config": {"quant_method": "nosuch"}}, ""),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ""),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ""),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ""),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, ""),
    ({"quantization_config": {"quant_method": "fp8"}}, ""),
    ({"quantization_config": {"quant_method": "torchao"}}, ""),
    ({"quantization_config": 3}, ""),
    ({"quantization_config": []}, ""),
    ({"quantization_config": {}}, ""),
    ({"attention_bias": "maybe"}, ""),
    ({"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"}, ""),
    ({"eos_token_id": "x"}, ""),
    ({"pad_token_id": -7}, ""),
    ({"pad_token_id": 10**9}, ""),
    ({"tie_word_embeddings": "x"}, ""),
    ({"sliding_window": -3}, ""),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=lambda value: json.dumps(value)[:60])
def test_config(folder: Path, changes: dict[str, Any], message: str) -> None:
    edited(folder, changes)
    said = refusal(folder, (CheckpointError, TargetError, NumericalError))
    assert message in said, said
