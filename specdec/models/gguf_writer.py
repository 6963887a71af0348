"""Writing models of llama.cpp's families to GGUF files with the package gguf: settings and weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

__all__ = ["add_settings", "add_weights"]


def add_settings(writer: Any, config: Any) -> None:
    """Write the sizes, rotary base and epsilon of a Llama-like config."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_weights(
    writer: Any, family: str, config: Any, weights: Iterable[tuple[str, torch.Tensor]], blocks: Any
) -> None:
    """Write weights: matrices as ``blocks``, a GGMLQuantizationType, all others in float32; names are transformers'.

    A matrix whose row is not a whole number of blocks is written in bfloat16. The query and key rows of a ``llama`` are
    put into llama.cpp's order, in which rotary pairs are neighbours.
    """
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    width = gguf.GGML_QUANT_SIZES[blocks][0]
    for key, tensor in weights:
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        place, _, part = key.rpartition(".")
        count = heads.get(place.rpartition(".")[2], 0) if family == "llama" else 0
        values = tensor.detach().float()
        if count:
            values = values.view(count, 2, tensor.shape[0] // count // 2, -1).transpose(1, 2).reshape(tensor.shape)
        kind = gguf.GGMLQuantizationType.F32
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.BF16 if values.shape[1] % width else blocks
        rows = gguf.quants.quantize(np.ascontiguousarray(values.numpy()), kind)
        writer.add_tensor(f"{names.get_name(place)}.{part}", rows, raw_dtype=kind)
