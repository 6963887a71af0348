"""GGUF files of tiny random models in quantised blocks, also of formats that the package gguf only reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests import models
from tests.gguf_files import TOKENS

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3moe", "mixtral")

# Format -> where d and m lie, the size of a weight where d is 1, and m / d so that weights are about zero.
_PLACES: dict[str, tuple[int, int | None, float, float]] = {
    "Q4_0": (0, None, 4.6, 0),
    "Q4_1": (0, 2, 4.6, -7.5),
    "Q5_0": (0, None, 9.2, 0),
    "Q5_1": (0, 2, 9.2, -15.5),
    "Q8_0": (0, None, 74, 0),
    "Q2_K": (80, 82, 10, 1.5),
    "Q3_K": (108, None, 42, 0),
    "Q4_K": (0, 2, 170, 7.5),
    "Q5_K": (0, 2, 340, 15.5),
    "Q6_K": (208, None, 1300, 0),
    "IQ4_NL": (0, None, 70, 0),
    "IQ4_XS": (0, None, 1300, 0),
    "MXFP4": (0, None, 5.8, 0),  # an exponent
}
SCALES_AT = {name: places[:2] for name, places in _PLACES.items()}
"""Format -> the places of d and m in a block."""
_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def random_blocks(name: str, outputs: int, inputs: int, *, size: float = 0.1, seed: int = 0) -> np.ndarray:
    """[outputs, bytes of a row] random blocks of weights of about ``size``."""
    values, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (outputs, inputs // values, count), dtype=np.uint8)
    d, m, spread, ratio = _PLACES[name]
    if name == "MXFP4":
        rows[..., d] = 128 + round(np.log2(size / spread)) + random.integers(-1, 2, rows.shape[:2])
        return rows.reshape(outputs, -1)
    scales = (size / spread * random.uniform(0.5, 1.5, rows.shape[:2])).astype(np.float16)
    signs = np.where(random.integers(0, 2, rows.shape[:2]), 1, -1).astype(np.float16)
    for at, part in ((d, scales * signs), (m, scales * signs * np.float16(ratio))):
        if at is not None:
            rows[..., at : at + 2] = np.ascontiguousarray(part).view(np.uint8).reshape(*rows.shape[:2], 2)
    return rows.reshape(outputs, -1)


def quantised_file(
    path: Path,
    kinds: Sequence[str] = ("Q4_0",),
    *,
    family: str = "llama",
    tied: bool = False,
    vocab_size: int = len(TOKENS),
    **sizes: Any,
) -> Path:
    """A random model of a family, whose matrices have these formats in turn; ``F16`` and others are plain numbers."""
    wide = {"num_attention_heads": 2, "head_dim": 128, "num_key_value_heads": 1} if family.startswith("qwen3") else {}
    if family == "qwen3moe":
        wide |= {"moe_intermediate_size": 256}
    tied = tied or family.startswith("gemma")  # llama.cpp knows no others
    changes = {**SIZES, "vocab_size": vocab_size, "tie_word_embeddings": tied, **wide, **sizes}
    kind_of = {"qwen3moe": "qwen3_moe"}.get(family, family)
    model: PreTrainedModel = models.new_model(kind_of, torch.float32, **changes)
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama" if family == "mixtral" else family)
    writer.add_name("small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim if hasattr(config, "head_dim") else 32)
    writer.add_key_length(getattr(config, "head_dim", 32))
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if family == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family.startswith("gemma"):
        writer.add_sliding_window(models.WINDOW)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    listed = [*TOKENS, *(f"<{n}>" for n in range(vocab_size - len(TOKENS)))][:vocab_size]
    writer.add_token_list(listed)
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["Ċ Ċ", "1 2"])
    turn = 0
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        place, _, kind = name.rpartition(".")
        leaf = place.rpartition(".")[2]
        known = {**_NAMES, **_AROUND} if family.startswith("gemma") else _NAMES
        layer = place.split(".")[2] if ".layers." in place else None
        target = f"{'' if layer is None else f'blk.{layer}.'}{known.get(leaf)}.{kind}"
        values = tensor.numpy()
        if values.ndim == 3:  # of gate and up, or of down, of all experts
            parts = kind.split("_")[:-1]
            for part, weights in zip(parts, np.split(values, len(parts), axis=1), strict=True):
                block, turn = kinds[turn % len(kinds)], turn + 1
                if block in _PLACES:
                    count, outputs, inputs = weights.shape
                    rows = random_blocks(block, count * outputs, inputs, size=0.15, seed=turn)
                    own = {"raw_dtype": gguf.GGMLQuantizationType[block]}
                    writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", rows.reshape(count, outputs, -1), **own)
                else:
                    half = np.float16 if block == "F16" else np.float32
                    writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", (weights / 3).astype(half))
            continue
        if leaf == "gate":
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", values)
            continue
        if values.ndim == 2:
            block = kinds[turn % len(kinds)]
            turn += 1
            if block in _PLACES:
                size = 1.0 if leaf == "embed_tokens" else 0.15
                rows = random_blocks(block, *values.shape, size=size, seed=turn)
                writer.add_tensor(target, rows, raw_dtype=gguf.GGMLQuantizationType[block])
                continue
            values = (values / 3).astype(np.float16 if block == "F16" else np.float32)
        else:
            values = np.random.default_rng(turn).normal(1, 0.1, values.shape).astype(np.float32)
        writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
