"""GGUF files of tiny random models of every architecture that is read, in float32, with any setting or tensor changed.

No number is a default of llama.cpp's or of transformers', and weights are large enough for every part to matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCABULARY, WIDTH, HEADS, KEYS, DIM, INNER, EXPERTS, WINDOW, CONTEXT = 96, 64, 4, 2, 16, 80, 4, 8, 64
ARCHITECTURES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "starcoder2", "phi3")
_LAYERS = {"gemma3": 7}  # which has one global layer in six
_WRITE = {bool: "bool", int: "uint32", float: "float32", str: "string"}


def settings_of(family: str) -> dict[str, Any]:
    """An architecture's settings, as llama.cpp's converter writes them; ``mixtral`` is a ``llama`` with experts."""
    epsilon = "layer_norm_epsilon" if family == "starcoder2" else "layer_norm_rms_epsilon"
    said: dict[str, Any] = {
        "context_length": CONTEXT,
        "block_count": _LAYERS.get(family, 3),
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEYS,
        f"attention.{epsilon}": 3e-4,
        "rope.freq_base": 5e3,
        "rope.dimension_count": DIM,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
    }
    if family in ("mixtral", "qwen3moe"):
        said |= {"expert_count": EXPERTS, "expert_used_count": 2}
    if family == "qwen3moe":
        said["expert_feed_forward_length"] = 48
    if family.startswith("gemma"):
        said |= {"attention.sliding_window": WINDOW}
    if family == "gemma2":
        said |= {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    return said


def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    """An architecture's tensors by name, in torch's order of dimensions."""
    queries, keys = HEADS * DIM, KEYS * DIM
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
    layer |= {
        "attn_output.weight": (WIDTH, queries),
        "ffn_down.weight": (WIDTH, INNER),
        "ffn_up.weight": (INNER, WIDTH),
    }
    if family == "phi3":
        layer |= {"attn_qkv.weight": (queries + 2 * keys, WIDTH), "ffn_up.weight": (2 * INNER, WIDTH)}
    else:
        sizes = {"q": queries, "k": keys, "v": keys}
        layer |= {f"attn_{part}.weight": (size, WIDTH) for part, size in sizes.items()}
        if family in ("qwen2", "starcoder2"):
            layer |= {f"attn_{part}.bias": (size,) for part, size in sizes.items()}
    if family == "starcoder2":
        layer |= {"attn_norm.bias": (WIDTH,), "ffn_norm.bias": (WIDTH,), "attn_output.bias": (WIDTH,)}
        layer |= {"ffn_up.bias": (INNER,), "ffn_down.bias": (WIDTH,)}
    if family not in ("phi3", "starcoder2"):
        layer["ffn_gate.weight"] = (INNER, WIDTH)
    if family in ("qwen3", "qwen3moe", "gemma3"):
        layer |= {"attn_q_norm.weight": (DIM,), "attn_k_norm.weight": (DIM,)}
    if family.startswith("gemma"):
        layer |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    if family in ("mixtral", "qwen3moe"):
        inner = 48 if family == "qwen3moe" else INNER
        layer = {
            name: shape for name, shape in layer.items() if not name.startswith(("ffn_gate", "ffn_up", "ffn_down"))
        }
        layer |= {"ffn_gate_inp.weight": (EXPERTS, WIDTH), "ffn_down_exps.weight": (EXPERTS, WIDTH, inner)}
        layer |= {f"ffn_{part}_exps.weight": (EXPERTS, inner, WIDTH) for part in ("gate", "up")}
    shapes = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    if not family.startswith("gemma"):  # whose head is the embedding's
        shapes["output.weight"] = (VOCABULARY, WIDTH)
    if family == "starcoder2":
        shapes["output_norm.bias"] = (WIDTH,)
    for number in range(_LAYERS.get(family, 3)):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def write_family(
    path: Path,
    family: str,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[int, ...] | None] | None = None,
    general: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
) -> Path:
    """A random model of an architecture.

    Args:
        path: of the file.
        family: of ``ARCHITECTURES``.
        settings: other values by their keys behind the architecture's name; None: the key is left out.
        tensors: shapes of more tensors by their names; None: the tensor is left out.
        general: settings by their whole keys.
        vocabulary: other ``tokens``, which are bytes and words, and their ``types``.
    """
    own = "llama" if family == "mixtral" else family
    writer = gguf.GGUFWriter(path, own)
    said = {f"{own}.{key}": value for key, value in (settings_of(family) | dict(settings or {})).items()}
    for key, value in (said | dict(general or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            getattr(writer, f"add_{_WRITE[type(value)]}")(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    listed = vocabulary or {"tokens": [f"t{number}" for number in range(VOCABULARY)], "types": [1] * VOCABULARY}
    writer.add_token_list(listed["tokens"])
    writer.add_token_types(listed["types"])
    writer.add_token_merges(["a b"] if vocabulary else ["t 1"])
    random = np.random.default_rng(len(family))
    for name, shape in (shapes_of(family) | dict(tensors or {})).items():
        if name in ("token_embd.weight", "output.weight"):
            shape = (len(listed["tokens"]), WIDTH)
        if shape is not None:
            noise = random.standard_normal(shape)
            if name.endswith("norm.weight") or "scale" in name or "rope" in name:
                noise = 1 + 0.3 * noise if "norm" in name else 1 + np.abs(noise)
            else:
                noise *= 0.5 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
            writer.add_tensor(name, noise.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
