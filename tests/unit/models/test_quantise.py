"""A model written in quantised blocks: the package gguf's numbers, the same tokens, or a clear word."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from specdec import Engine
from specdec.errors import CheckpointError, ConfigError, SpecdecWarning
from specdec.models.live_model import load_model
from specdec.models.loading import embedded_model
from specdec.models.quantise import quantise_model
from specdec.models.tokenizer import load_tokenizer
from tests.gguf_files import widened
from tests.llama_cpp import LlamaCpp, apart, log_probabilities


def load(place: str | Path, dtype: str = "float32") -> Any:
    return load_model(place, dtype=dtype, device=None, device_map=None, trust_remote_code=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_a_model_is_written_and_read_again(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    quantise_model("tiny", kind, file)
    written, own = load(file).state_dict(), load("tiny").state_dict()
    blocks = gguf.GGMLQuantizationType[kind.upper()]
    file_type = gguf.GGUFReader(file).fields["general.file_type"].contents()
    assert file_type == gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]
    for name, weight in own.items():
        if weight.ndim == 2:
            rows = gguf.quants.quantize(weight.numpy(), blocks)
            weight = torch.from_numpy(gguf.quants.dequantize(rows, blocks))
        assert torch.equal(written[name], weight), name
    text = "What is 12 + 30?\n\n It's na\u00efve."
    found, expected = load_tokenizer(file), load_tokenizer("tiny")
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found.chat_template == expected.chat_template
    engine = Engine.from_pretrained(file)
    prompt = engine.encode(text)
    plain = Engine(engine.target, engine.tokenizer, "none").generate(prompt, 20).token_ids
    assert engine.generate(prompt, 20).token_ids == plain


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("q4_k", "a.gguf", "no quantiser for Q4_K; give one of .*q8_0"),
        ("q9", "a.gguf", "--type is 'q9', which GGUF does not know; give one of"),
        ("q8_0", "a.bin", "ends with .gguf"),
        ("q8_0", "there.gguf", "exists; delete it"),
    ],
)
def test_what_cannot_be_written_is_refused(kind: str, name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "there.gguf").touch()
    with pytest.raises(ConfigError, match=message):
        quantise_model("tiny", kind, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["there.gguf"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.models.quantise.rules", lambda: ("falcon",))  # which splits otherwise
    with pytest.raises(CheckpointError, match="splits texts by a rule"):
        quantise_model("tiny", "q8_0", tmp_path / "a.gguf")
    assert not [*tmp_path.iterdir()]


def folder_of(place: Path, *, ends: Any = 1, family: str = "Llama", **changes: Any) -> Path:
    """A random model of a family with the embedded model's tokenizer."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    options = {**sizes, **heads, "vocab_size": 4096, "max_position_embeddings": 256, "pad_token_id": 2, **changes}
    config = getattr(transformers, f"{family}Config")(eos_token_id=ends, **options)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model() / name, place)
    return place


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 3e5}}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": None, "rms_norm_eps": 0.03}),
        ("Qwen2", {"vocab_size": 4112, "ends": [1, 4096]}),
        ("Qwen3", {"head_dim": 32, "rms_norm_eps": 0.03}),
    ],
    ids=str,
)
def test_llama_cpp_reads_the_model_that_was_written(
    family: str, changes: dict[str, Any], llama_cpp: LlamaCpp, tmp_path: Path
) -> None:
    """All weights are given values, biases and norms too; the file is compared without llama.cpp's rounding of rows."""
    place, prompts = folder_of(tmp_path / "own", family=family, **changes), [[7, 3, 9], [*range(5, 205)]]
    model = load(place)
    for seed, (name, weight) in enumerate(model.state_dict().items()):
        own = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
        weight.copy_(own + 1 if name.endswith("norm.weight") else own)
    model.save_pretrained(place)
    quantise_model(place, "q8_0", file := tmp_path / "a.gguf")
    blocks = gguf.GGMLQuantizationType.Q8_0
    for weight in model.state_dict().values():
        if weight.ndim == 2:
            rows = gguf.quants.quantize(weight.numpy(), blocks)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(rows, blocks)))
    found = llama_cpp.logits(widened(file, tmp_path / "wide.gguf"), prompts, model.config.vocab_size)
    assert found is not None
    assert apart(log_probabilities(model.double(), prompts), found) <= 1e-9


def test_all_ends_are_written(tmp_path: Path) -> None:
    quantise_model(folder_of(tmp_path / "own", ends=[1, 7, 9]), "q8_0", file := tmp_path / "a.gguf")
    assert load(file).generation_config.eos_token_id == [1, 7, 9]


@pytest.mark.few(1)
def test_ends_by_name_are_warned_of(tmp_path: Path) -> None:
    place, file = folder_of(tmp_path / "own", ends=[7]), tmp_path / "a.gguf"
    with pytest.warns(SpecdecWarning, match=r"end at \['<\|end\|>'\] as well, as llama.cpp takes these for ends"):
        quantise_model(place, "q8_0", file)
    assert load(file).generation_config.eos_token_id == [1, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "Mistral", "sliding_window": 16}, "has attention within a window of 16 tokens"),
        ({"family": "Qwen3", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "window of 16"),
        ({"hidden_act": "gelu"}, "has the activation 'gelu', and llama.cpp computes silu"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "scales its rotary"),
        ({"ends": [1, 7, 9, 11, 12]}, r"ends an answer at 5 tokens, and GGUF has keys for three: \[11, 12\] would be"),
        ({"family": "Qwen2"}, r"has '<\|endoftext\|>' at 4096, and the model has rows for 4096 tokens"),
        ({"ends": None}, r"would end at \[.*\] as well, for want of an end"),
    ],
    ids=str,
)
def test_a_model_that_the_file_would_not_be_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        quantise_model(folder_of(tmp_path / "own", **changes), "q8_0", tmp_path / "a.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
