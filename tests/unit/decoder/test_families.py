"""Families: every key of a config is read or known to change nothing, and every tensor has its name and its shape."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.decoder.families import FAMILIES, spec_of
from specdec.decoder.names import FUSED, Weight, shapes_of
from specdec.decoder.settings import Settings
from specdec.decoder.spec import DecoderSpec, Experts, ShortConv, UnknownDecoder
from specdec.errors import CheckpointError, SpecdecWarning
from tests import models
from tests.decoders import ALL, BIASED, spec_of_config


def config_of(family: str, **changes: Any) -> Any:
    name = {"gemma3": "gemma3_text"}.get(family, family)
    return AutoConfig.for_model(name, **{**models._FAMILIES[family][2], **changes})


FAMILIES_BY_CLASS = {family.architecture: family for family in FAMILIES.values()}


def tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Transformers' tensors of a decoder and their shapes, by what is written of it."""
    names, found = FAMILIES_BY_CLASS[spec.architecture].names, dict[str, tuple[int, ...]]()
    shapes = shapes_of(spec)
    for weight, shape in shapes.items():
        if weight.expert is None:
            rows, *rest = shape
            whole = names.own(weight)  # of several, where these are stacked
            found[whole] = (found.get(whole, (0,))[0] + rows, *rest)
    for number, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, Experts):
            for fused, parts in FUSED.items():
                assert all(Weight(part, number, layer.mlp.count - 1) in shapes for part in parts)
                for every in (Weight(fused, number, kind=kind) for kind in ("weight", "bias")[: 1 + layer.mlp.bias]):
                    found[names.own(every)] = names.fused_shape(every, layer.mlp, spec.hidden)
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_that_a_class_declares_is_read(model_type: str) -> None:
    attends = {"layer_types": ["full_attention"] * 32} if model_type == "granitemoehybrid" else {}  # not by default
    config = AutoConfig.for_model(model_type, **attends)
    settings = Settings.of(config)
    spec_of(model_type, settings)
    assert not settings.unread.keys() & {name for name in vars(config) if not name.startswith("_")}


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("changed", [False, True])
def test_tensors_are_called_and_shaped_as_the_models(family: str, changed: bool) -> None:
    config = config_of(family, **(BIASED.get(family, {}) if changed else {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = spec_of_config(config)
    kept = {name: own for name, own in model.named_buffers() if name in model.state_dict()}
    assert tensors(spec) == {name: tuple(own.shape) for name, own in [*model.named_parameters(), *kept.items()]}
    assert spec.architecture == type(model).__name__
    assert (spec.vocab, spec.hidden, len(spec.layers)) == (models.VOCAB, config.hidden_size, 3)


def test_windows_are_those_of_the_layers() -> None:
    for family, windows in models.WINDOWS.items():
        if family in ALL:
            mixers = [layer.mixer for layer in spec_of_config(config_of(family)).layers]
            assert [own.width if isinstance(own, ShortConv) else own.window for own in mixers] == windows
    moved = spec_of_config(config_of("qwen3", **BIASED["qwen3"]))
    assert [layer.attention.window for layer in moved.layers] == [None, None, 5]


def test_a_kind_of_layer_that_a_model_has_not_needs_no_positions() -> None:
    full = {"rope_type": "default", "rope_theta": 1e5}
    changes = {"layer_types": ["full_attention"] * 3, "rope_parameters": {"full_attention": full}}
    spec = spec_of_config(config_of("mellum", **changes))
    assert [layer.attention.rope.base for layer in spec.layers] == [1e5] * 3


def test_layers_that_are_alike_are_one_object() -> None:
    spec = spec_of_config(AutoConfig.for_model("gemma3_text"))
    assert len({id(layer) for layer in spec.layers}) == len({*spec.layers}) == 2


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama", {"hidden_act": "relu"}, "says hidden_act 'relu', and known are silu"),
        ("olmoe", {"clip_qkv": 4.0}, "says clip_qkv 4.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "says use_bidirectional_attention True"),
        ("llama", {"is_encoder_decoder": True}, "says is_encoder_decoder True"),
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 3}, "has layers of the type 'linear_attention'"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "has no layer of the type full_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "turns 4 of",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*partial_rotary_factor")
def test_what_no_description_has_is_refused_by_name(family: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownDecoder, match=says):
        spec_of_config(config_of(family, **changes))


def test_a_family_without_a_function_is_refused_by_name() -> None:
    with pytest.raises(UnknownDecoder, match="its model_type 'mamba' is none of cohere, cohere2"):
        spec_of("mamba", Settings({}, where="X"))


def test_a_key_that_a_newer_class_declares_counts_once_it_is_set() -> None:
    settings = Settings.of(config_of("llama"))
    settings._values["attention_temperature"] = None
    settings._defaults["attention_temperature"] = None
    spec_of("llama", settings)
    settings._values["attention_temperature"] = 2.0
    with pytest.raises(UnknownDecoder, match=r"says attention_temperature 2\.0, which no description of it reads"):
        settings.check_read()


def test_a_key_that_no_class_declares_is_warned_of_where_it_sounds_like_numbers() -> None:
    spec_of_config(config_of("llama", unsloth_version="2026", rope_note=None))
    with pytest.warns(SpecdecWarning, match="says logit_scale 0.5, which its class does not know"):
        spec_of_config(config_of("llama", logit_scale=0.5))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "its num_key_value_heads 3 do not divide"),
        ({"rms_norm_eps": 0.0}, "says rms_norm_eps 0.0, not a number above 0"),
        ({"intermediate_size": -1}, "says intermediate_size -1, not an integer from 1 on"),
    ],
)
def test_a_value_that_cannot_be_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        spec_of_config(config_of("llama", **changes))


def test_layer_types_fit_the_layers() -> None:
    with pytest.raises(CheckpointError, match="sliding_attention layers and no sliding_window"):
        spec_of_config(config_of("qwen2", use_sliding_window=False, layer_types=["sliding_attention"] * 3))
    settings = Settings({**config_of("qwen2").to_dict(), "layer_types": ["full_attention"]}, where="X")
    with pytest.raises(CheckpointError, match="has 3 layers and says layer_types"):
        spec_of("qwen2", settings)


def test_more_experts_than_there_are() -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok 9, and has 4 experts"):
        spec_of_config(config_of("mixtral", num_experts_per_tok=9))


def test_layers_that_choose_more_experts_than_others() -> None:
    spec = spec_of_config(config_of("hunyuan_v1_moe", moe_topk=[1, 3, 1]))
    assert [layer.mlp.chosen for layer in spec.layers if isinstance(layer.mlp, Experts)] == [1, 3, 1]
    for moe_topk, says in ([1, 7, 1], "says moe_topk 7, and has 6 experts"), ([1], "has 3 layers and says moe_topk"):
        with pytest.raises(CheckpointError, match=says):
            spec_of_config(config_of("hunyuan_v1_moe", moe_topk=moe_topk))


def test_a_description_needs_no_torch() -> None:
    asked = "import sys, specdec.decoder.families; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0
