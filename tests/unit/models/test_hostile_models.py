"""Model folders that are broken or out of all measure: each is refused, with the file and the remedy."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import Engine, SpecdecError, TransformersTarget
from specdec.errors import CheckpointError, ConfigError, NumericalError, SpecdecWarning, TargetError
from specdec.models.loading import embedded_model
from tests.models import new_model

NAN, INF = float("nan"), float("inf")
DIGITS = "9" * 5000


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    model = new_model("llama", torch.float32, vocab_size=4096, num_hidden_layers=2)
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
    "a list": "[]",
    "deep": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "digits": f'{{"vocab_size": {DIGITS}, "eos_token_id": {DIGITS}, "version": {DIGITS}}}',
    "nothing": "",
    "half": '{"a": ',
    "null": "null",
    "a text": '"x"',
    "binary": "\x00\x01\x02",
}
NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
KINDS = [
    pytest.param(text, marks=[pytest.mark.slow] * (n > 2), id=kind) for n, (kind, text) in enumerate(BROKEN.items())
]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", KINDS)
def test_a_file_that_is_no_object(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    message = refusal(folder, CheckpointError)
    assert f"no tokenizer at '{folder}'" in message if "tokenizer" in name else str(folder / name) in message


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_not_utf_8(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b'{"a": "\xff\xfe"}')
    assert str(folder) in refusal(folder, CheckpointError)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_where_a_file_should_be(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    assert str(folder) in refusal(folder, CheckpointError)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_link_that_leads_nowhere(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "gone")
    assert str(folder) in refusal(folder, CheckpointError)


def edited(folder: Path, changes: dict[str, Any], name: str = "config.json") -> None:
    values = json.loads((folder / name).read_text())
    values.update(changes)
    (folder / name).write_text(json.dumps(values))


SIZES: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be an integer from 1"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
    ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5, of type float; it must be an integer from 1 to 8191"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": -32}, "hidden_size is -32"),
    ({"hidden_size": 10**9}, "2,000,004,192,000,000,000 weights or more, and the safetensors beside it hold"),
    ({"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000"),
    ({"intermediate_size": -1}, "intermediate_size is -1"),
    ({"intermediate_size": 10**9}, "it is another model's; download both anew"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"head_dim": "x"}, "head_dim is 'x', of type str"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"vocab_size": True}, "vocab_size is True, of type bool"),
    ({"vocab_size": 10**9}, "32,000,005,120 weights or more"),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
    ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000"),
]


@pytest.mark.parametrize(("changes", "message"), SIZES, ids=lambda value: str(value)[:50])
def test_sizes_that_no_model_has(folder: Path, changes: dict[str, Any], message: str) -> None:
    edited(folder, changes)
    said = refusal(folder, CheckpointError)
    assert str(folder / "config.json") in said
    assert message in said


# What transformers itself stumbles over, in one way or another; the first ones stand for all in the quick tests.
CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "none of its tensors is a quant_state or SCB; remove quantization_config",
    ),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "says rope_theta 0, not a number above 0"),
    ({"hidden_act": "nosuch"}, "nosuch"),
    ({"rms_norm_eps": "x"}, "Field 'rms_norm_eps' expected float, got str"),
    ({"model_type": "gpt2"}, "does not fit GPT2LMHeadModel"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "none of its tensors is a qweight"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "none of its tensors is a qweight"),
    ({"quantization_config": {"load_in_8bit": True}}, "none of its tensors is a quant_state or SCB"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "with config_groups None, and a mapping"),
    ({"quantization_config": {"quant_method": "torchao"}}, "by torchao, whose modules are run on a GPU alone"),
    ({"quantization_config": {"quant_method": "hqq"}}, "by hqq, whose modules are run on a GPU alone"),
    ({"quantization_config": []}, ""),
    ({"quantization_config": {}}, "has no `quant_method`"),
    ({"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1.0}}, "nosuch"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "Missing required keys"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, ""),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": NAN}}, "says rope_theta nan, not a number above 0"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"rms_norm_eps": NAN}, "says rms_norm_eps nan, not a number above 0"),
    ({"num_key_value_heads": 3}, "do not divide"),
    ({"num_hidden_layers": 3}, "9 missing"),
    ({"num_hidden_layers": 1}, "9 extra"),
    ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"hidden_size": [32]}, "hidden_size"),
    ({"hidden_size": 33}, "not a multiple"),
    ({"head_dim": 7}, ""),
    ({"vocab_size": 100}, "misshapen"),
    ({"vocab_size": None}, "vocab_size"),
    ({"dtype": "nosuch"}, "nosuch"),
    ({"dtype": "int8"}, "int8"),
    ({"dtype": 3}, ""),
    ({"model_type": 3}, "model type `3`"),
    ({"model_type": "bert"}, "does not fit Bert"),
    ({"model_type": "t5"}, "T5 is an encoder-decoder"),
    ({"model_type": "clip"}, "CLIPConfig"),
    ({"model_type": "mamba"}, "Mamba has layers that specdec cannot roll back"),
    ({"layer_types": 3}, ""),
    ({"layer_types": ["nosuch"] * 2}, "nosuch"),
    ({"attention_bias": "maybe"}, "attention_bias"),
    ({"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}, "custom code"),
    ({"eos_token_id": "x"}, "eos_token_id"),
]
LATER = [
    pytest.param(*case, marks=[pytest.mark.slow] * (n > 4), id=str(case[0])[:50]) for n, case in enumerate(CONFIGS)
]


@pytest.mark.parametrize(("changes", "message"), LATER)
def test_a_config_that_transformers_stumbles_over(folder: Path, changes: dict[str, Any], message: str) -> None:
    edited(folder, changes)
    said = refusal(folder, (CheckpointError, TargetError, NumericalError))
    assert message in said


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": "x"},
        {"eos_token_id": [1, None]},
        {"eos_token_id": 1.5},
        {"eos_token_id": {"a": 1}},
    ],
)
def test_tokens_of_an_end_that_are_none(folder: Path, changes: dict[str, Any]) -> None:
    edited(folder, changes, "generation_config.json")
    assert "eos_token_id" in refusal(folder, (CheckpointError, ConfigError))


@pytest.mark.parametrize("options", [{"temperature": "hot", "do_sample": True}, {"nosuch": [[]]}])
def test_options_of_a_generation_config_that_make_no_sense_are_only_named(
    folder: Path, options: dict[str, Any]
) -> None:
    edited(folder, options, "generation_config.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecdecWarning)
        assert len(Engine.from_pretrained(folder, policy="off").generate("import os", 3).token_ids) == 3


# -- Weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 5000, -1])
def test_weights_that_were_cut_short(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert str(folder) in refusal(folder, CheckpointError)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b"{",
        b'{"x": 3}',
        b'{"x":' * 5000,
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 9]}}',
    ],
)
def test_a_header_that_says_nothing(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert str(folder) in refusal(folder, CheckpointError)


@pytest.mark.parametrize("shard", ["gone.safetensors", "config.json", ".", "tokenizer.json"])
def test_an_index_that_names_what_is_no_shard(folder: Path, shard: str) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    assert str(folder) in refusal(folder, CheckpointError)


@pytest.mark.parametrize("text", [BROKEN["deep"], BROKEN["digits"], "[]"], ids=["deep", "digits", "a list"])
def test_an_index_that_is_no_object(folder: Path, text: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    assert str(folder / "model.safetensors.index.json") in refusal(folder, CheckpointError)


@pytest.mark.few(5)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_that_are_no_numbers_are_named(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = refusal(folder, NumericalError)
    assert f"LlamaForCausalLM: the model's own logits are {value if name[0] == 'l' else ''}" in said
    assert f"its weight '{name}' holds NaN or infinity; download or train the weights anew" in said


def test_a_model_without_layers_or_head() -> None:
    model: Any = new_model("llama")
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(TargetError, match="LlamaForCausalLM gives its cache no keys and values"):
        TransformersTarget(model)
    model = new_model("llama")
    with pytest.raises(TargetError, match=r"has no embedding and head of its own; load a \.\.\.ForCausalLM"):
        TransformersTarget(model.model)


def test_a_model_that_fails_in_its_own_way() -> None:
    class Failing(torch.nn.Module):
        def forward(self, *_: Any, **__: Any) -> None:
            raise KeyError("nosuch")

    model: Any = new_model("llama")
    model.model.layers[1].mlp = Failing()
    with pytest.raises(TargetError, match=r"the model's own forward fails .* without specdec: KeyError: 'nosuch'"):
        TransformersTarget(model)


# -- Tokenizers --------------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model(good: Path, tmp_path: Path) -> None:
    new_model("llama", torch.float32, num_hidden_layers=2).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(good / name, tmp_path / name)
    said = refusal(tmp_path, CheckpointError)
    assert (
        f"the tokenizer at '{tmp_path}' has 4096 tokens, and LlamaForCausalLM knows 32: it is another model's" in said
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "changes", [{"model": {"type": "nosuch"}}, {"model": None}, {"added_tokens": 3}, {"decoder": 3}]
)
def test_a_tokenizer_with_broken_parts(folder: Path, changes: dict[str, Any]) -> None:
    edited(folder, changes, "tokenizer.json")
    assert f"no tokenizer at '{folder}'" in refusal(folder, CheckpointError)
