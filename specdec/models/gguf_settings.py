"""What a GGUF file says of its model, as llama.cpp reads it: each setting, and llama.cpp's default where it is missing.

Transformers' own table leaves settings out, and has its classes' defaults for those that are missing. Here a setting
that changes the model is read, or the file is refused by the setting's name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from transformers import AutoConfig

from specdec.errors import CheckpointError, SpecdecWarning, shown

__all__ = ["FAMILIES", "config_of", "is_mixtral"]

_REMEDY = "load the model's folder of safetensors"
_LAYERS = 8191
_TELLING = ("rope", "attention", "expert", "scale", "norm", "window", "cap", "bias")  # in names of what changes a model
_NEVER = {  # no family here has a place for these; their values where they change nothing
    "attention.causal": (True,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1.0,),
}
_EMBEDDINGS = ("bert", "embed", "t5encoder", "clip")
_DRAFTS = ("eagle", "dflash", "medusa", "assistant")


class _Settings:
    """The settings of a file's architecture, each of which is read once or listed as of no effect."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.family, self._metadata, self._where = str(metadata["general.architecture"]), metadata, where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._metadata.get(f"{self.family}.{name}", default)

    def number(self, name: str, default: float | None = None) -> Any:
        """A number, which is at least 0; a list has to have the same one for all layers.

        Raises:
            CheckpointError: it is missing and has no default, or is no such number.
        """
        value = self.get(name, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is None:
            raise self.refused(f"does not say {self.family}.{name}, without which a model has no size", "get it again")
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self.refused(
                f"says {self.family}.{name} {shown(value)}, and a number is needed that holds for all layers"
            )
        return value

    def only(self, name: str, *meant: Any) -> None:
        """Raises CheckpointError where a setting is there and has none of these values."""
        value = self.get(name, meant[0])
        if value not in meant:
            raise self.refused(f"says {self.family}.{name} {shown(value)}, and only {meant[0]} is read from GGUF")

    def check_rest(self) -> None:
        """Raises CheckpointError for settings that would change the model, and which are not read."""
        for name, values in _NEVER.items():
            self.only(name, *values)
        prefix = f"{self.family}."
        own = [key.removeprefix(prefix) for key in self._metadata if key.startswith(prefix)]
        for name in own:
            if name in self._read or name in _known():
                continue
            if any(part in name for part in _TELLING):
                raise self.refused(f"says {prefix}{name}, which neither specdec nor llama.cpp's converter knows")
            warnings.warn(f"{prefix}{name} is not known, and not read", SpecdecWarning, stacklevel=2)

    def refused(self, why: str, remedy: str = _REMEDY) -> CheckpointError:
        return CheckpointError(f"{self._where} {why}; {remedy}")


@cache
def _known() -> Collection[str]:
    """The settings that llama.cpp's architectures have."""
    from gguf import Keys  # imported late: it can import other tokenizer packages, for seconds

    groups = (vars(group) for name, group in vars(Keys).items() if not name.startswith("_"))
    keys = [key for group in groups for key in group.values() if isinstance(key, str)]
    return frozenset(key.removeprefix("{arch}.") for key in keys if key.startswith("{arch}."))


def config_of(metadata: Mapping[str, Any], names: Collection[str], where: str = "the GGUF file") -> Any:
    """The config of transformers that a file's settings make.

    Args:
        metadata: the settings by llama.cpp's keys; a list of words may be given as its length.
        names: of the file's tensors.
        where: the file, as errors name it.

    Raises:
        CheckpointError: a setting is missing, or it says what is not read from GGUF; or the architecture is not.
    """
    said = _Settings(metadata, where)
    if (family := FAMILIES.get(said.family)) is None:
        raise _unlike(said.family, where)
    values = _common(said) | family(said)
    said.check_rest()
    size = metadata.get("tokenizer.ggml.tokens", said.get("vocab_size"))
    values["vocab_size"] = len(size) if isinstance(size, list) else size
    if values["vocab_size"] is None:
        raise said.refused("lists no tokens, and does not say how many there are", "get it again")
    values["tie_word_embeddings"] = "output.weight" not in names
    return AutoConfig.for_model(values.pop("model_type"), **values)


def is_mixtral(metadata: Mapping[str, Any]) -> bool:
    """Whether a file says that it is a Llama with experts."""
    return metadata["general.architecture"] == "llama" and bool(metadata.get("llama.expert_count"))


def _unlike(family: str, where: str) -> CheckpointError:
    if any(part in family for part in _EMBEDDINGS):
        why = "makes embeddings and no text; give a language model"
    elif any(part in family for part in _DRAFTS):
        why = "is a draft head and no model: give the model, and the head as the folder that it was published in"
    else:
        why = f"is not read from GGUF here, {', '.join(FAMILIES)} are; {_REMEDY}"
    return CheckpointError(f"the architecture {family!r} of {where} {why}")


def _common(said: _Settings) -> dict[str, Any]:
    """Sizes and rotary frequencies; heads of one width, all of which is rotated."""
    width, heads, layers = (said.number(name) for name in ("embedding_length", "attention.head_count", "block_count"))
    if not heads or not width or not 1 <= layers <= _LAYERS:
        raise said.refused(f"says {layers} layers with {heads} heads and a width of {width}", "get it again")
    dim = said.number("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        said.only(name, dim)
    return {
        "max_position_embeddings": said.number("context_length"),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": said.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.number("attention.head_count_kv", heads),
        "head_dim": dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_base(said)},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _rope_base(said: _Settings) -> float:
    """The base of rotary frequencies that are not scaled.

    Raises:
        CheckpointError: they are scaled.
    """
    kind = said.get("rope.scaling.type", "linear")
    factor = said.number("rope.scaling.factor", said.number("rope.scale_linear", 0))
    if kind not in ("none", "linear") or factor not in (0, 1):
        raise said.refused(
            f"scales its rotary frequencies (rope.scaling.type {kind!r}, factor {factor}), which is not read from GGUF "
            "here: the model would be another one"
        )
    return float(said.number("rope.freq_base", 10000.0))


def _rms_norm(said: _Settings) -> dict[str, Any]:
    return {"rms_norm_eps": float(said.number("attention.layer_norm_rms_epsilon"))}


def _dense(said: _Settings, model_type: str) -> dict[str, Any]:
    """A model without experts."""
    said.only("expert_count", 0)
    said.only("expert_used_count", 0)
    return {"model_type": model_type, **_rms_norm(said)}


def _llama(said: _Settings) -> dict[str, Any]:
    if count := said.number("expert_count", 0):
        experts = {"num_local_experts": count, "num_experts_per_tok": said.number("expert_used_count")}
        return {"model_type": "mixtral", "sliding_window": None, **_rms_norm(said), **experts}
    return _dense(said, "llama")


def _qwen2(said: _Settings) -> dict[str, Any]:
    return {**_dense(said, "qwen2"), "use_sliding_window": False}


def _qwen3(said: _Settings) -> dict[str, Any]:
    return {**_dense(said, "qwen3"), "use_sliding_window": False}


def _qwen3moe(said: _Settings) -> dict[str, Any]:
    chosen = said.number("expert_used_count")
    return {
        "model_type": "qwen3_moe",
        "num_experts": said.number("expert_count"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": said.number(
            "expert_feed_forward_length", said.number("feed_forward_length") // max(chosen, 1)
        ),
        "norm_topk_prob": True,
        "use_sliding_window": False,
        **_rms_norm(said),
    }


def _gemma(said: _Settings, model_type: str, largest: int, every: int) -> dict[str, Any]:
    """Attention's scale, and layers with a window.

    Args:
        said: the file's settings.
        model_type: transformers' name of the family.
        largest: layers of the size whose attention is scaled by its width.
        every: one of so many layers is global.
    """
    width, heads, layers = (said.number(name) for name in ("embedding_length", "attention.head_count", "block_count"))
    dim = said.number("attention.key_length", width // heads)
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        said.only(name, dim)
    pattern = said.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        local = [bool(one) for one in pattern[:layers]]
    else:
        local = [not pattern or layer % pattern < pattern - 1 for layer in range(layers)]
    return {
        **_dense(said, model_type),
        "query_pre_attn_scalar": width // heads if layers == largest else dim,
        "layer_types": ["sliding_attention" if here else "full_attention" for here in local],
    }


def _gemma2(said: _Settings) -> dict[str, Any]:
    said.only("rope.freq_base_swa", said.number("rope.freq_base", 10000.0))
    return {
        **_gemma(said, "gemma2", 46, 2),
        "sliding_window": said.number("attention.sliding_window", 4096),
        "attn_logit_softcapping": said.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": said.number("final_logit_softcapping", 30.0),
    }


def _gemma3(said: _Settings) -> dict[str, Any]:
    values = _gemma(said, "gemma3_text", 62, 6)
    window = said.number("attention.sliding_window", 0)
    if not window:  # then all layers are global
        values["layer_types"] = ["full_attention"] * len(values["layer_types"])
    bases = {
        "full_attention": said.number("rope.freq_base", 10000.0),
        "sliding_attention": said.number("rope.freq_base_swa", 10000.0),
    }
    return {
        **values,
        "sliding_window": window or 4096,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": float(base)} for kind, base in bases.items()},
        "final_logit_softcapping": said.number("final_logit_softcapping", 0) or None,
    }


def _starcoder2(said: _Settings) -> dict[str, Any]:
    said.only("expert_count", 0)
    said.only("expert_used_count", 0)
    epsilon = float(said.number("attention.layer_norm_epsilon"))
    return {"model_type": "starcoder2", "norm_epsilon": epsilon, "sliding_window": None}


def _phi3(said: _Settings) -> dict[str, Any]:
    return {**_dense(said, "phi3"), "sliding_window": None}


FAMILIES: dict[str, Callable[[_Settings], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "starcoder2": _starcoder2,
    "phi3": _phi3,
}
"""Architecture -> what its settings say beyond those of all."""
