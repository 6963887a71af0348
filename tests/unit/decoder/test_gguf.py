"""A file means what llama.cpp says it means: each setting and each tensor is read alike, or refused by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import Keys

from specdec.errors import CheckpointError, SpecdecError, SpecdecWarning
from specdec.models.live_model import load_model
from tests.gguf_families import CONTEXT, DIM, FAMILIES, VOCABULARY, settings_of, write_family
from tests.llama_cpp import LlamaCpp, apart, log_probabilities

PROMPTS = [[7, 3, 9], [*range(5, CONTEXT - 4)]]  # the second is longer than the windows
GELU = ("gemma", "gemma2", "gemma3", "starcoder2")  # which llama.cpp has as a table in float16
Said = dict[str, Any]


def load(file: Path, dtype: str = "float32") -> Any:
    return load_model(file, dtype=dtype, device=None, device_map=None, trust_remote_code=False)


def own_logits(file: Path) -> torch.Tensor | None:
    """[prompts, vocabulary] log-probabilities in float64; None: the file is refused."""
    try:
        return log_probabilities(load(file, "float64"), PROMPTS)
    except SpecdecError:
        return None


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_llama_cpp_s(family: str, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    file = write_family(tmp_path / "a.gguf", family)
    found, expected = own_logits(file), llama_cpp.logits(file, PROMPTS, VOCABULARY)
    assert found is not None
    assert expected is not None
    assert apart(found, expected) <= (1e-6 if family in GELU else 1e-9)


_YARN: Said = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
_READ: list[tuple[str, Said]] = [  # what moves llama.cpp's logits, and is read alike
    ("llama", {"rope.freq_base": None}),
    ("llama", {"rope.dimension_count": None, "attention.key_length": None, "attention.value_length": None}),
    ("llama", {"attention.layer_norm_rms_epsilon": 0.1}),
    ("mixtral", {"rope.freq_base": None}),
    ("mixtral", {"expert_used_count": 3}),
    ("qwen2", {"rope.freq_base": None}),
    ("qwen3", {"rope.freq_base": None}),
    ("qwen3moe", {"expert_used_count": 1}),
    ("gemma2", {"rope.freq_base": None}),
    ("gemma2", {"attention.sliding_window": None}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"attention.sliding_window_pattern": 3}),
    ("gemma2", {"attention.sliding_window_pattern": [True, True, False]}),
    ("gemma3", {"rope.freq_base": None}),
    ("gemma3", {"rope.freq_base_swa": 300.0}),
    ("gemma3", {"attention.sliding_window": None}),
    ("gemma3", {"attention.sliding_window_pattern": 2}),
    ("gemma3", {"final_logit_softcapping": 4.0}),
    ("starcoder2", {"rope.freq_base": 1e6}),
    ("starcoder2", {"attention.layer_norm_epsilon": 0.1}),
    ("phi3", {"rope.freq_base": None}),
    ("phi3", {"rope.dimension_count": 8}),
    ("phi3", {"rope.scale_linear": 4.0}),
    ("phi3", {"rope.scaling.attn_factor": 2.0}),
    ("llama", {"rope.scale_linear": 4.0}),
    ("llama", {"rope.scaling.factor": 4.0}),
    ("llama", {"rope.scaling.attn_factor": 2.0}),
    ("mixtral", {"rope.scaling.factor": 4.0}),
    ("granite", {"logit_scale": 2.0}),
    ("granite", {"residual_scale": None}),
    ("granite", {"embedding_scale": None}),
    ("granite", {"attention.scale": None}),
    ("qwen2moe", {"expert_used_count": 1}),
    ("olmo2", {"attention.sliding_window": 8}),
    ("olmoe", {"expert_used_count": 3}),
    ("olmoe", {"rope.freq_base": None}),
    ("cohere2", {"attention.sliding_window_pattern": 2}),
    ("cohere2", {"logit_scale": 0.7}),
    ("command-r", {"logit_scale": None}),
    ("gemma", {"rope.freq_base": None}),
    ("glm4", {"rope.dimension_count": 8}),
    ("glm4moe", {"expert_weights_scale": None}),
    ("glm4moe", {"expert_weights_norm": None}),
    ("glm4moe", {"expert_gating_func": None, "expert_used_count": 3}),
    ("hunyuan-dense", {"rope.scaling.alpha": 9.0}),
    ("hunyuan-moe", {"expert_used_count": 1}),
    ("gpt-oss", {"expert_used_count": 3}),
    ("gpt-oss", {"attention.sliding_window_pattern": 3}),
    ("granitemoe", {"expert_used_count": 3}),
    ("granitemoe", {"logit_scale": 2.0}),
    ("mistral3", {"attention.temperature_scale": 0.9}),
    ("mistral3", {"attention.temperature_scale": None}),
    ("mistral3", {"rope.scaling.original_context_length": 32}),
    ("mistral3", {**_YARN, "rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.5}),
    ("mistral3", {**_YARN, "rope.scaling.yarn_log_multiplier": 0.7}),
    ("mistral3", {**_YARN, "rope.scaling.yarn_beta_fast": 4.0, "attention.temperature_scale": None}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "settings"), _READ, ids=str)
def test_settings_are_read(family: str, settings: Said, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    plain = write_family(tmp_path / "a.gguf", family)
    file = write_family(tmp_path / "b.gguf", family, settings)
    found, expected = own_logits(file), llama_cpp.logits(file, PROMPTS, VOCABULARY)
    before = llama_cpp.logits(plain, PROMPTS, VOCABULARY)
    assert found is not None
    assert expected is not None
    assert before is not None
    changes = len(settings) == 1  # a width that follows from the others is no change
    assert not changes or apart(before, expected) > 1e-6
    assert apart(found, expected) <= (1e-6 if family in GELU else 1e-9)


_REFUSED: list[tuple[str, Said, str]] = [  # what moves llama.cpp's logits or is refused by it, and is refused by name
    (
        "llama",
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
        "scales its rotary frequencies .*longrope",
    ),
    ("granite", {"rope.scaling.finetuned": False}, "says granite.rope.scaling.finetuned False, and only True"),
    ("glm4", {"rope.dimension_sections": [4, 2, 2, 0]}, "dimension_sections .4, 2, 2, 0., and only text"),
    ("glm4moe", {"expert_gating_func": 1}, "says glm4moe.expert_gating_func 1, and only 2 is read"),
    ("llama", {"attention.causal": False}, "says llama.attention.causal False"),
    ("llama", {"attention.layer_norm_rms_epsilon": None}, "does not say llama.attention.layer_norm_rms_epsilon"),
    ("llama", {"context_length": None}, "does not say llama.context_length"),
    ("llama", {"nextn_predict_layers": 1}, "says llama.nextn_predict_layers 1, and only 0 is read"),
    ("glm4", {"block_count": 5, "nextn_predict_layers": 1}, "says glm4.block_count 5 and has tensors of 3 layers"),
    (
        "glm4",
        {"nextn_predict_layers": 3},
        "says glm4.nextn_predict_layers 3 and block_count 3, and an integer below that",
    ),
    ("glm4", {"nextn_predict_layers": 2**31}, "says glm4.nextn_predict_layers 2147483648 and block_count 3"),
    ("llama", {"block_count": 2}, "says llama.block_count 2 and has tensors of 3 layers"),
    ("llama", {"attention.head_count_kv": [2, 2, 4]}, "head_count_kv .2, 2, 4., and a number is needed"),
    ("llama", {"attention.value_length": 8}, "says llama.attention.value_length 8, and only 16 is read"),
    ("gemma2", {"rope.freq_base_swa": 300.0}, "says gemma2.rope.freq_base_swa 300.0, and only 5000.0 is read"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "settings", "message"), _REFUSED, ids=str)
def test_settings_are_refused_by_name(
    family: str, settings: Said, message: str, llama_cpp: LlamaCpp, tmp_path: Path
) -> None:
    plain, file = (write_family(tmp_path / f"{n}.gguf", family, said) for n, said in enumerate(({}, settings)))
    with pytest.raises(CheckpointError, match=message):
        load(file)
    before, moved = (llama_cpp.logits(one, PROMPTS, VOCABULARY) for one in (plain, file))
    assert before is not None
    assert moved is None or apart(before, moved) > 1e-9


_COMMON = {  # that llama.cpp reads of every architecture, and an error names where it changes a model
    *("attention.causal", "attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.value_length", "block_count"),
    *("context_length", "embedding_length", "expert_count", "expert_group_count", "expert_group_used_count"),
    *("expert_used_count", "feed_forward_length", "nextn_predict_layers", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.type", "vocab_size", "classifier.output_labels"),
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa", "embedding_length_out"),
    "pooling_type",
}
_WINDOWS = {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}
_OWN = {  # that an architecture reads
    "gemma2": {*_WINDOWS, "attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": {*_WINDOWS, "final_logit_softcapping"},
    "olmo2": _WINDOWS,
    "cohere2": _WINDOWS,
    "exaone4": _WINDOWS,
    "gpt-oss": _WINDOWS,
    "granitemoe": {"expert_shared_feed_forward_length"},
    "glm4": {"rope.dimension_sections"},
    "glm4moe": {"rope.dimension_sections"},
    "ernie4_5": {"rope.dimension_sections"},
    "hunyuan-dense": {"rope.dimension_sections", "rope.scaling.alpha"},
    "qwen3moe": {"expert_feed_forward_length"},
    "phi3": {"attention.sliding_window"},
}


_TYPED = {"finetuned": True, **dict.fromkeys(("scale", "factor", "cap", "mul", "beta", "alpha"), 0.5)}
"""What is in a key's name -> a value of the type that llama.cpp expects; whole numbers otherwise."""


def known_keys() -> list[str]:
    groups = (vars(group) for name, group in vars(Keys).items() if not name.startswith("_"))
    keys = (key for group in groups for key in group.values() if isinstance(key, str) and key.startswith("{arch}."))
    return sorted({key.removeprefix("{arch}.") for key in keys if key.count("{") == 1})


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_settings_that_an_architecture_does_not_read_change_nothing(
    family: str, llama_cpp: LlamaCpp, tmp_path: Path
) -> None:
    """All that llama.cpp knows and this architecture does not read, at once, in whichever type."""
    plain = write_family(tmp_path / "a.gguf", family)
    before = llama_cpp.logits(plain, PROMPTS, VOCABULARY)
    own = own_logits(plain)
    unread = [key for key in known_keys() if key not in _COMMON | _OWN.get(family, set()) | {*settings_of(family)}]
    assert len(unread) > 40
    said = {key: next((value for part, value in _TYPED.items() if part in key), 3) for key in unread}
    file = write_family(tmp_path / "b.gguf", family, said)
    found, expected = own_logits(file), llama_cpp.logits(file, PROMPTS, VOCABULARY)
    assert before is not None
    assert expected is not None
    assert torch.equal(before, expected)
    assert own is not None
    assert found is not None
    assert torch.equal(own, found)


_TENSORS: list[tuple[str, dict[str, tuple[int, ...] | None], str]] = [
    (
        "qwen3",
        {f"blk.{n}.ffn_up.bias": (80,) for n in range(3)},
        "3 tensors that are biases, such as blk.0.ffn_up.bias",
    ),
    ("llama", {"blk.1.ffn_down.scale": (1,)}, "scale weights that were quantised as NVFP4 or BitNet"),
    ("llama", {"output.scale": (1,)}, "scale weights that were quantised"),
    ("qwen2", {"rope_freqs.weight": (DIM // 2,)}, "scale the rotary frequencies, such as rope_freqs.weight"),
    ("llama", {"rope_freqs.weight": (DIM,)}, "has 16 numbers in rope_freqs.weight, not 8"),
    ("llama", {"blk.0.attn_q_norm.weight": (DIM,)}, "'llama' does not read here, such as blk.0.attn_q_norm.weight"),
    ("llama", {"sundry.weight": (4,)}, "does not read here, such as sundry.weight"),
    (
        "llama",
        {"blk.2.ffn_up.weight": None},
        r"1 missing, such as (blk\.2\.ffn_up|model\.layers\.2\.mlp\.up_proj)\.weight",
    ),
    ("qwen3", {"output.bias": (VOCABULARY,)}, "are biases, such as output.bias"),
    ("qwen2", {"rope_factors_long.weight": (8,)}, "scale the rotary frequencies, such as rope_factors_long.weight"),
    ("phi3", {"rope_factors_long.weight": (DIM,)}, "has 16 numbers in rope_factors_long.weight, not 8"),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("family", "tensors", "message"), _TENSORS, ids=str)
@pytest.mark.parametrize("device_map", [None, "auto"])
def test_tensors_that_are_not_read_are_refused(
    family: str, tensors: dict[str, tuple[int, ...] | None], message: str, device_map: str | None, tmp_path: Path
) -> None:
    """Before a weight is read, and also where transformers would load the file."""
    file = write_family(tmp_path / "a.gguf", family, tensors=tensors)
    with pytest.raises(CheckpointError, match=rf"a\.gguf'.*{message}"):
        load_model(file, dtype="float32", device=None, device_map=device_map, trust_remote_code=False)


def test_experts_of_gate_and_up_in_one(tmp_path: Path) -> None:
    file = write_family(tmp_path / "a.gguf", "qwen3moe", tensors={"blk.0.ffn_gate_up_exps.weight": (4, 96, 64)})
    with pytest.raises(CheckpointError, match="are gate and up of experts in one"):
        load(file)


_WRONG: list[tuple[str, Said, str]] = [
    *(
        (family, {"expert_used_count": count}, f"has 4 experts, of which a token goes to {count}")
        for family in ("mixtral", "qwen2moe", "qwen3moe")
        for count in (0, 5)
    ),
    ("hunyuan-moe", {"expert_shared_feed_forward_length": 48}, "expert_shared_feed_forward_length 48, and only 80"),
    ("phi3", {"rope.dimension_count": 7}, "turns 7 of the 16 values of a head"),
    ("glm4", {"rope.dimension_count": 32}, "turns 32 of the 16 values of a head"),
    ("phi3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "which is not read of phi3"),
    ("llama", {"rope.scaling.attn_factor": 0.0}, "it has no positions"),
    ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 1.0}, "it has no positions"),
]


@pytest.mark.parametrize(("family", "settings", "message"), _WRONG, ids=str)
def test_settings_that_no_model_has(family: str, settings: Said, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(write_family(tmp_path / "a.gguf", family, settings))


def test_a_trained_length_of_nought_is_the_context_s(tmp_path: Path) -> None:
    said = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    files = [
        write_family(tmp_path / f"{n}.gguf", "llama", {**said, "rope.scaling.original_context_length": length})
        for n, length in enumerate((0, CONTEXT))
    ]
    found, expected = (own_logits(file) for file in files)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["granite", "granitemoe"])
def test_a_hybrid_without_recurrent_layers_is_a_granite(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp ends itself over such a file, and its converter calls it Granite."""
    expected = own_logits(write_family(tmp_path / "a.gguf", family))
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], own="granitehybrid"))
    found = own_logits(write_family(tmp_path / "a.gguf", family))
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected)
    unscaled = own_logits(write_family(tmp_path / "a.gguf", family, {"logit_scale": None}))
    assert unscaled is not None
    assert apart(unscaled, expected) > 1e-6
    for keys, count in ([2, 0, 2], 1), (0, 3):
        with pytest.raises(CheckpointError, match=f"has {count} recurrent layers, which specdec does not run"):
            load(write_family(tmp_path / "a.gguf", family, {"attention.head_count_kv": keys}))


def test_settings_that_are_not_known(tmp_path: Path) -> None:
    file = write_family(tmp_path / "a.gguf", "llama", {"attention.odd_scale": 2.0})
    with pytest.raises(CheckpointError, match=r"says llama\.attention\.odd_scale, which neither specdec"):
        load(file)
    file = write_family(tmp_path / "a.gguf", "llama", {"author_mood": 2})
    with pytest.warns(SpecdecWarning, match=r"llama\.author_mood is not known, and not read"):
        load(file)


_GENERAL: list[tuple[Said, str]] = [
    ({"general.type": "adapter"}, "is an adapter and no model; merge it"),
    ({"general.type": "mmproj"}, "is a vision or audio projector"),
    ({"split.count": 3, "split.no": 1}, r"is part 2 of 3 of a split model .* does not end in '-00002-of-00003\.gguf'"),
]


@pytest.mark.parametrize(("general", "message"), _GENERAL, ids=str)
def test_files_that_are_no_model(general: Said, message: str, tmp_path: Path) -> None:
    file = write_family(tmp_path / "a.gguf", "llama", general=general)
    with pytest.raises(CheckpointError, match=message):
        load(file)


def test_tensors_of_an_adapter_say_what_it_is(tmp_path: Path) -> None:
    file = write_family(tmp_path / "a.gguf", "llama", tensors={"blk.0.attn_q.weight.lora_a": (8, 64)})
    with pytest.raises(CheckpointError, match="is an adapter and no model; merge it"):
        load(file)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"GGUF\0\0\0\3", "is big-endian, and GGUF files are read here in little-endian"),
        (b"GGUF\1\0\0\0", "is GGUF of version 1"),
        (b"tjgg\1\0\0\0", "is of llama.cpp's format before GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a pointer of git-lfs and not the file"),
    ],
)
def test_files_of_other_kinds(head: bytes, message: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.gguf").write_bytes(head + bytes(200))
    with pytest.raises(CheckpointError, match=message):
        load(file)
