"""Heads with random weights in the layouts in which others publish them, small enough for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
WIDTHS = {"heads": 4, "key_heads": 2, "head_dim": 8, "inner": 48}


class Random:
    """Tensors of a seed; large enough that a guess depends on all of them."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * gain * shape[-1] ** -0.5

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self._generator)


def layer(
    random: Random, prefix: str, size: int, *, inputs: int | None = None, qk_norm: bool = False, bias: bool = False,
    first_norm: bool = True,
) -> Tensors:  # fmt: skip
    """A decoder layer whose queries, keys and values read ``inputs`` values."""
    heads, keys = (WIDTHS["head_dim"] * WIDTHS[name] for name in ("heads", "key_heads"))
    found = {
        f"{prefix}self_attn.q_proj.weight": random.matrix(heads, inputs or size, gain=2.0),
        f"{prefix}self_attn.k_proj.weight": random.matrix(keys, inputs or size, gain=2.0),
        f"{prefix}self_attn.v_proj.weight": random.matrix(keys, inputs or size),
        f"{prefix}self_attn.o_proj.weight": random.matrix(size, heads, gain=2.0),
        f"{prefix}mlp.gate_proj.weight": random.matrix(WIDTHS["inner"], size),
        f"{prefix}mlp.up_proj.weight": random.matrix(WIDTHS["inner"], size),
        f"{prefix}mlp.down_proj.weight": random.matrix(size, WIDTHS["inner"]),
        f"{prefix}post_attention_layernorm.weight": random.norm(size),
    }
    if first_norm:
        found[f"{prefix}input_layernorm.weight"] = random.norm(size)
    if qk_norm:
        found |= {f"{prefix}self_attn.{one}_norm.weight": random.norm(WIDTHS["head_dim"]) for one in "qk"}
    if bias:
        found |= {
            f"{prefix}self_attn.{one}_proj.bias": 0.3 * random.norm(out)
            for one, out in (("q", heads), ("k", keys), ("v", keys), ("o", size))
        }
    return found


def layer_config(size: int, vocab: int, layers: int = 1, **changes: Any) -> dict[str, Any]:
    """What a config says of the layers."""
    return {
        "hidden_size": size,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "num_attention_heads": WIDTHS["heads"],
        "num_key_value_heads": WIDTHS["key_heads"],
        "head_dim": WIDTHS["head_dim"],
        "intermediate_size": WIDTHS["inner"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        **changes,
    }


def draft_vocabulary(random: Random, vocab: int, draft: int) -> Tensors:
    """``d2t`` and ``t2d`` of some tokens."""
    tokens = torch.randperm(vocab, generator=random._generator)[:draft].sort().values
    drafted = torch.zeros(vocab, dtype=torch.bool)
    drafted[tokens] = True
    return {"d2t": tokens - torch.arange(draft), "t2d": drafted}


def eagle1(size: int, vocab: int, *, bias: bool = True, seed: int = 0) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-1 and 2, as the authors publish it."""
    random = Random(seed)
    tensors = {"fc.weight": random.matrix(size, 2 * size), **layer(random, "layers.0.", size, first_norm=False)}
    if bias:
        tensors["fc.bias"] = 0.1 * random.norm(size)
    return {"architectures": ["LlamaForCausalLM"], **layer_config(size, vocab)}, tensors


def eagle3(
    size: int, vocab: int, *, draft: int = 0, taps: tuple[int, ...] = (0, 1, 2), embedding: bool = False, seed: int = 0,
    norms: str = "none", bias: bool = False, **changes: Any,
) -> tuple[dict[str, Any], Tensors]:  # fmt: skip
    """EAGLE-3 and 3.1, as the authors publish it; ``taps`` are layers whose outputs are read."""
    random, count = Random(seed), len(taps)
    tensors = {
        "fc.weight": random.matrix(size, count * size),
        **layer(random, "midlayer.", size, inputs=2 * size, bias=bias),
        "midlayer.hidden_norm.weight": random.norm(size),
        "norm.weight": random.norm(size),
        "lm_head.weight": random.matrix(draft or vocab, size, gain=3.0),
    }
    if draft:
        tensors |= draft_vocabulary(random, vocab, draft)
    if embedding:
        tensors["embed_tokens.weight"] = random.matrix(vocab, size, gain=size**0.5)
    if norms == "whole":
        tensors["input_norm.weight"] = random.norm(count * size)
    elif norms == "each":
        tensors |= {f"fc_norm.{place}.weight": random.norm(size) for place in range(count)}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(size, vocab, 40),  # one published config says so of its one layer
        "draft_vocab_size": draft or vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*taps]},
        **changes,
    }
    return config, tensors


def peagle(size: int, vocab: int, *, layers: int = 2, draft: int = 0, seed: int = 0) -> tuple[dict[str, Any], Tensors]:
    """P-EAGLE, as the package ``speculators`` writes it; the layers that it names come after what is read."""
    config, tensors = eagle3(size, vocab, draft=draft, embedding=True, seed=seed)
    random = Random(seed + 1)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    for place in range(1, layers):
        tensors |= layer(random, f"layers.{place}.", size)
    tensors["mask_hidden"] = random.matrix(1, 1, 3 * size, gain=3.0)
    return speculators("peagle", config, layers, eagle_aux_hidden_state_layer_ids=[1, 2, 3], mask_token_id=0), tensors


def dflash(
    size: int, vocab: int, *, kind: str = "dflash", layers: int = 2, block: int = 5, taps: tuple[int, ...] = (0, 1),
    draft: int = 0, markov: str = "", rank: int = 6, confidence: bool = True, own: bool = False, seed: int = 0,
    **changes: Any,
) -> tuple[dict[str, Any], Tensors]:  # fmt: skip
    """DFlash, DFlash2 or DSpark, as the authors publish it; ``taps`` are layers whose outputs are read."""
    random = Random(seed)
    tensors = {"fc.weight": random.matrix(size, len(taps) * size), "hidden_norm.weight": random.norm(size)}
    for place in range(layers):
        tensors |= layer(random, f"layers.{place}.", size, qk_norm=True)
    tensors["norm.weight"] = random.norm(size)
    if own or draft:
        tensors["lm_head.weight"] = random.matrix(draft or vocab, size, gain=3.0)
    if own:
        tensors["embed_tokens.weight"] = random.matrix(vocab, size, gain=size**0.5)
    if draft:
        tensors |= draft_vocabulary(random, vocab, draft)
    if markov:
        tensors["markov_head.markov_w1.weight"] = random.matrix(vocab, rank, gain=3.0)
        tensors["markov_head.markov_w2.weight"] = random.matrix(draft or vocab, rank, gain=3.0)
        for name, outputs, inputs in (("gate_proj", rank, size + rank), ("joint_proj", 3 * rank, 2 * rank + size)):
            if (markov, name) in (("gated", "gate_proj"), ("rnn", "joint_proj")):
                tensors[f"markov_head.{name}.weight"] = random.matrix(outputs, inputs, gain=2.0)
                tensors[f"markov_head.{name}.bias"] = random.matrix(outputs)
        if confidence:
            tensors["confidence_head.proj.weight"] = random.matrix(1, size + rank)
            tensors["confidence_head.proj.bias"] = random.matrix(1)
    if kind == "dflash2":
        for place in range(layers):
            for part in ("attention_conv", "mlp_conv"):
                base = 0.3 * random.matrix(2, 2, size, gain=size**0.5)
                base[:, 0] += 1
                tensors[f"layers.{place}.{part}.base_kernel"] = base
                tensors[f"layers.{place}.{part}.kernel_projection.weight"] = random.matrix(4 * size // 8, size)
        for name in ("predecessor", "successor"):
            tensors[f"candidate_selector.{name}_codebook"] = random.matrix(vocab, rank, gain=rank**0.5)
        tensors["candidate_selector.hidden_projection.weight"] = random.matrix(rank, size)
        changes.setdefault("selector_top_k", 6)
    config = {
        "architectures": ["DFlashDraftModel"],
        **layer_config(size, vocab, layers),
        "block_size": block,
        "draft_vocab_size": draft or vocab,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [*taps]},
        **changes,
    }
    return config, tensors


def speculators(kind: str, config: Mapping[str, Any], layers: int, **own: Any) -> dict[str, Any]:
    """A config as that package writes it, around the sizes of the layers."""
    names = {*layer_config(1, 1), "layer_types", "sliding_window"}
    inner = {name: value for name, value in config.items() if name in names}
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": {
            "model_type": config.get("model_type", "llama"),
            **inner,
            "num_hidden_layers": layers,
        },
        "draft_vocab_size": config.get("draft_vocab_size", config["vocab_size"]),
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "someone/model", "architectures": []},
        },
        **own,
    }


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """A folder as it is downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
