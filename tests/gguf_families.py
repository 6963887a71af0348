"""GGUF files of tiny random models of many architectures, in float32, with any setting or tensor changed.

No number is a default of llama.cpp's or of transformers', and weights are large enough for every part to matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCABULARY, WIDTH, HEADS, KEYS, DIM, INNER, EXPERTS, WINDOW, CONTEXT = 96, 64, 4, 2, 16, 80, 4, 8, 64
_NARROW = 48  # width of an expert, where the file says it
_QUERIES, _PAIRS = HEADS * DIM, KEYS * DIM
_WRITE = {bool: "bool", int: "uint32", float: "float32", str: "string"}
_RMS, _LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"

Shapes = dict[str, tuple[int, ...]]


def _experts(inner: int) -> Shapes:
    into = {f"ffn_{part}_exps.weight": (EXPERTS, inner, WIDTH) for part in ("gate", "up")}
    return {"ffn_gate_inp.weight": (EXPERTS, WIDTH), "ffn_down_exps.weight": (EXPERTS, WIDTH, inner), **into}


_PARTS: dict[str, Shapes] = {  # of a layer
    "norms": {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)},
    "one norm": {"attn_norm.weight": (WIDTH,)},
    "norm biases": {"attn_norm.bias": (WIDTH,), "ffn_norm.bias": (WIDTH,)},
    "later norms": {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)},
    "later norm": {"post_attention_norm.weight": (WIDTH,)},
    "attention": {
        "attn_output.weight": (WIDTH, _QUERIES),
        "attn_q.weight": (_QUERIES, WIDTH),
        "attn_k.weight": (_PAIRS, WIDTH),
        "attn_v.weight": (_PAIRS, WIDTH),
    },
    "square attention": {f"attn_{name}.weight": (_QUERIES, WIDTH) for name in ("output", "q", "k", "v")},
    "square norms": {"attn_q_norm.weight": (_QUERIES,), "attn_k_norm.weight": (_QUERIES,)},
    "stacked attention": {
        "attn_output.weight": (WIDTH, _QUERIES),
        "attn_qkv.weight": (_QUERIES + 2 * _PAIRS, WIDTH),
    },
    "biases": {"attn_q.bias": (_QUERIES,), "attn_k.bias": (_PAIRS,), "attn_v.bias": (_PAIRS,)},
    "output bias": {"attn_output.bias": (WIDTH,)},
    "head norms": {"attn_q_norm.weight": (DIM,), "attn_k_norm.weight": (DIM,)},
    "wide norms": {"attn_q_norm.weight": (_QUERIES,), "attn_k_norm.weight": (_PAIRS,)},
    "sinks": {"attn_sinks.weight": (HEADS,)},
    "gated": {"ffn_gate.weight": (INNER, WIDTH), "ffn_up.weight": (INNER, WIDTH), "ffn_down.weight": (WIDTH, INNER)},
    "stacked": {"ffn_up.weight": (2 * INNER, WIDTH), "ffn_down.weight": (WIDTH, INNER)},
    "plain": {
        "ffn_up.weight": (INNER, WIDTH),
        "ffn_down.weight": (WIDTH, INNER),
        "ffn_up.bias": (INNER,),
        "ffn_down.bias": (WIDTH,),
    },
    "experts": _experts(INNER),
    "narrow experts": _experts(_NARROW),
    "expert biases": {
        "ffn_gate_inp.bias": (EXPERTS,),
        "ffn_gate_exps.bias": (EXPERTS, _NARROW),
        "ffn_up_exps.bias": (EXPERTS, _NARROW),
        "ffn_down_exps.bias": (EXPERTS, WIDTH),
    },
    "shared expert": {
        "ffn_gate_shexp.weight": (_NARROW, WIDTH),
        "ffn_up_shexp.weight": (_NARROW, WIDTH),
        "ffn_down_shexp.weight": (WIDTH, _NARROW),
    },
    "wide shared expert": {
        "ffn_gate_shexp.weight": (INNER, WIDTH),
        "ffn_up_shexp.weight": (INNER, WIDTH),
        "ffn_down_shexp.weight": (WIDTH, INNER),
    },
    "choice": {"exp_probs_b.bias": (EXPERTS,)},
    "shared expert's gate": {"ffn_gate_inp_shexp.weight": (WIDTH,)},
}


@dataclass(frozen=True)
class Family:
    """The parts of an architecture's layers, and its settings beyond those of all.

    Attributes:
        own: the architecture that a file names, where it differs from the key; else empty.
        tied: whether the head is the embedding.
        biased: whether the last norm has a bias.
    """

    parts: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 3
    own: str = ""
    tied: bool = False
    biased: bool = False


_DENSE = ("norms", "attention", "gated")
_CHOSEN = {"expert_count": EXPERTS, "expert_used_count": 2}
_NARROWED = {**_CHOSEN, "expert_feed_forward_length": _NARROW}
_SHARED = {**_NARROWED, "expert_shared_feed_forward_length": _NARROW}
_SLIDES = {"attention.sliding_window": WINDOW}
_GEMMA = (*_DENSE, "later norms")
_SCALES = {"logit_scale": 3.0, "residual_scale": 0.7, "embedding_scale": 2.0, "attention.scale": 0.3}
_LAYER_NORMED: dict[str, Any] = {_RMS: None, _LAYER_NORM: 3e-4}
FAMILIES = {
    "llama": Family(_DENSE),
    "mixtral": Family(("norms", "attention", "experts"), _CHOSEN, own="llama"),
    "qwen2": Family((*_DENSE, "biases")),
    "qwen3": Family((*_DENSE, "head norms")),
    "qwen3moe": Family(("norms", "attention", "head norms", "narrow experts"), _NARROWED),
    "gemma2": Family(_GEMMA, {**_SLIDES, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}, tied=True),
    "gemma3": Family((*_GEMMA, "head norms"), _SLIDES, layers=7, tied=True),  # one layer in six is global
    "starcoder2": Family(
        ("norms", "norm biases", "attention", "biases", "output bias", "plain"), _LAYER_NORMED, biased=True
    ),
    "phi3": Family(("norms", "stacked attention", "stacked")),
    "gpt-oss": Family(
        ("one norm", "later norm", "attention", "biases", "output bias", "sinks", "narrow experts", "expert biases"),
        {**_NARROWED, **_SLIDES},
    ),
    "granite": Family(_DENSE, _SCALES),
    "granitemoe": Family(("norms", "attention", "experts"), {**_CHOSEN, **_SCALES}),
    "smollm3": Family(_DENSE, layers=5),  # one layer in four has no positions
    "mistral3": Family(_DENSE, {"attention.temperature_scale": 0.4, "rope.scaling.original_context_length": 16}),
    "qwen2moe": Family(
        ("norms", "attention", "biases", "narrow experts", "shared expert", "shared expert's gate"), _SHARED
    ),
    "glm4": Family(("norms", "later norms", "attention", "stacked")),
    "glm4moe": Family(
        ("one norm", "later norm", "attention", "biases", "narrow experts", "shared expert", "choice"),
        {
            **{**_NARROWED, "expert_shared_count": 1, "expert_weights_scale": 1.7, "expert_weights_norm": True},
            **{"expert_gating_func": 2, "leading_dense_block_count": 0, "rope.dimension_count": DIM // 2},
        },
    ),
    "olmo2": Family(("later norms", "attention", "wide norms", "gated")),
    "olmoe": Family(
        ("norms", "square attention", "square norms", "experts"), {**_CHOSEN, "attention.head_count_kv": HEADS}
    ),
    "command-r": Family(("one norm", "attention", "gated"), {**_LAYER_NORMED, "logit_scale": 0.3}, tied=True),
    "cohere2": Family(
        ("one norm", "attention", "gated"), {**_LAYER_NORMED, **_SLIDES, "logit_scale": 0.3}, layers=5, tied=True
    ),
    "gemma": Family(_DENSE, tied=True),
    "seed_oss": Family(("one norm", "later norm", "attention", "biases", "gated")),
    "exaone4": Family(("later norms", "attention", "head norms", "gated"), _SLIDES, layers=64),
    "ernie4_5": Family(_DENSE),
    "hunyuan-dense": Family((*_DENSE, "head norms")),
    "hunyuan-moe": Family(
        ("norms", "attention", "head norms", "experts", "wide shared expert"),
        {**_CHOSEN, "expert_feed_forward_length": INNER, "expert_shared_feed_forward_length": INNER},
    ),
}
"""Architecture -> what its files hold; ``mixtral`` is a ``llama`` with experts."""


def settings_of(family: str) -> dict[str, Any]:
    """An architecture's settings, as llama.cpp's converter writes them; None: it has none."""
    return {
        "context_length": CONTEXT,
        "block_count": FAMILIES[family].layers,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEYS,
        _RMS: 3e-4,
        "rope.freq_base": 5e3,
        "rope.dimension_count": DIM,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        **FAMILIES[family].settings,
    }


def shapes_of(family: str) -> Shapes:
    """An architecture's tensors by name, in torch's order of dimensions."""
    known = FAMILIES[family]
    shapes: Shapes = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    if not known.tied:
        shapes["output.weight"] = (VOCABULARY, WIDTH)
    if known.biased:
        shapes["output_norm.bias"] = (WIDTH,)
    for number in range(known.layers):
        for part in known.parts:
            shapes |= {f"blk.{number}.{name}": shape for name, shape in _PARTS[part].items()}
    return shapes


def biases_of(family: str, *, output: bool = False) -> Shapes:
    """The biases of an architecture's queries, keys and values; ``output``: and of attention's last product."""
    keys = settings_of(family)["attention.head_count_kv"] * DIM
    sizes = {"attn_q": _QUERIES, "attn_k": keys, "attn_v": keys, **({"attn_output": WIDTH} if output else {})}
    layers = range(FAMILIES[family].layers)
    return {f"blk.{layer}.{name}.bias": (size,) for layer in layers for name, size in sizes.items()}


def predicting_of(family: str) -> Shapes:
    """A layer of multi-token prediction behind an architecture's own."""
    number, every = FAMILIES[family].layers, shapes_of(family)
    layer = {name.replace("blk.0.", f"blk.{number}."): shape for name, shape in every.items() if "blk.0." in name}
    around = {"eh_proj": (WIDTH, 2 * WIDTH), "enorm": (WIDTH,), "hnorm": (WIDTH,), "shared_head_norm": (WIDTH,)}
    return {**layer, **{f"blk.{number}.nextn.{name}.weight": shape for name, shape in around.items()}}


def fused_of(family: str, *, bias: bool = False) -> dict[str, tuple[int, ...] | None]:
    """The change that has queries, keys and values of each layer in one tensor; ``bias``: and so their biases."""
    rows, found = _QUERIES + 2 * _PAIRS, dict[str, tuple[int, ...] | None]()
    for layer in range(FAMILIES[family].layers):
        for kind, shape in (("weight", (rows, WIDTH)), *([("bias", (rows,))] if bias else ())):
            found |= {f"blk.{layer}.attn_{name}.{kind}": None for name in "qkv"}
            found[f"blk.{layer}.attn_qkv.{kind}"] = shape
    return found


def write_family(
    path: Path,
    family: str,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[int, ...] | None] | None = None,
    general: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    types: Mapping[str, str] | None = None,
) -> Path:
    """A random model of an architecture.

    Args:
        path: of the file.
        family: of ``FAMILIES``.
        settings: other values by their keys behind the architecture's name; None: the key is left out.
        tensors: shapes of more tensors by their names; None: the tensor is left out.
        general: settings by their whole keys.
        vocabulary: other ``tokens``, which are bytes and words, and their ``types``.
        types: how tensors' names end, and the type that these are quantised to.
    """
    words = len(vocabulary["tokens"]) if vocabulary else VOCABULARY
    random, every = np.random.default_rng(len(family)), dict[str, np.ndarray]()
    for name, shape in (shapes_of(family) | dict(tensors or {})).items():
        if shape is not None and name in ("token_embd.weight", "output.weight"):
            shape = (words, WIDTH)
        if shape is not None:
            noise = random.standard_normal(shape)
            if name.endswith("norm.weight") or "scale" in name or "rope" in name:
                noise = 1 + 0.3 * noise if "norm" in name else 1 + np.abs(noise)
            else:
                noise *= 0.5 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
                if name.endswith("_exps.bias"):
                    noise *= 20.0  # so that gates reach their bounds
            every[name] = noise
    said = settings_of(family) | dict(settings or {})
    return write_file(path, FAMILIES[family].own or family, said, every, general, vocabulary, types)


def write_file(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    general: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    types: Mapping[str, str] | None = None,
) -> Path:
    """These tensors as a file; else as of :func:`write_family`."""
    writer = gguf.GGUFWriter(path, architecture)
    said = {f"{architecture}.{key}": value for key, value in settings.items()}
    for key, value in (said | dict(general or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            getattr(writer, f"add_{_WRITE[type(value)]}")(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    if (listed := vocabulary) is None:
        size = len(tensors["token_embd.weight"])
        listed = {"tokens": [f"t{number}" for number in range(size)], "types": [1] * size}
    writer.add_token_list(listed["tokens"])
    writer.add_token_types(listed["types"])
    writer.add_token_merges(["a b"] if vocabulary else ["t 1"])
    for name, numbers in tensors.items():
        kind = gguf.GGMLQuantizationType[next((one for end, one in (types or {}).items() if name.endswith(end)), "F32")]
        writer.add_tensor(name, gguf.quants.quantize(numbers.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
