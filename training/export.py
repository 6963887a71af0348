"""Exporting heads to other engines, in the layout of the package ``speculators`` or of EAGLE-3's authors.

The file lacks what those engines take unchanged from the target. It has what a head reads in another form, or over a
draft vocabulary. :mod:`drafters.heads.layout` can read both layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafters.heads.config import BlockConfig, ChainConfig, HeadConfig
from drafters.heads.loading import load_head
from drafters.heads.weights import WEIGHTS, HeadWeights
from drafters.shared.weights import save_weights
from specdec.errors import ConfigError, check_choice
from specdec.target import Target

__all__ = ["LAYOUTS", "export"]

LAYOUTS = ("speculators", "eagle3")
"""``speculators`` is the package's layout, which vLLM reads; ``eagle3`` is EAGLE-3's authors', which SGLang reads. The
latter is never for vLLM, which would read each hidden state one layer early."""

_CLASSES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}


def export(folder: Path, out: Path, drafter: str, target: Target, *, layout: str, verifier: str) -> dict[str, Any]:
    """Write a head in a layout that other engines load.

    Args:
        folder: the head's folder, in any format that specdec reads.
        out: the folder to write.
        drafter: name of the drafter that uses the head.
        target: its target.
        layout: one of ``LAYOUTS``.
        verifier: name or path under which those engines find the target.

    Returns:
        The config that was written.

    Raises:
        CheckpointError: there is no such head, or the folder could not be written.
        ConfigError: the layout cannot describe the head.
    """
    check_choice("layout", layout, LAYOUTS)
    head = load_head(folder, drafter, target)
    config: HeadConfig = head.config
    # The package cannot fill a chain's missing embedding from the target, though it can fill a block's.
    tensors = _tensors(head, target, layout == "speculators" and isinstance(config, ChainConfig))
    if layout == "eagle3":
        values, tensors = _authors(config, tensors, target)
    else:
        values = _speculators(config, target, verifier)
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    dtype = target.dtype if target.dtype.itemsize < 4 else None
    save_weights(out, WEIGHTS, tensors, values, what="the head", dtype=dtype)
    return values


def _tensors(head: HeadWeights, target: Target, embedding: bool) -> dict[str, torch.Tensor]:
    """The tensors by both layouts' names, with those that engines would not find in the target.

    With ``embedding``, the target's embedding is included, even where layers read it unchanged.
    """
    config, tensors = head.config, {name: tensor.cpu() for name, tensor in head.state_dict().items()}
    drafted = tensors.pop("draft_tokens", None)
    if drafted is not None:
        tensors["d2t"] = drafted - torch.arange(len(drafted))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, drafted, True)
    if not config.own_head:
        tensors["lm_head.weight"] = _matrix(target, drafted)
    if not config.own_embedding and (embedding or not _reads_as_it_is(target)):
        tensors["embed_tokens.weight"] = target.embed(torch.arange(target.vocab_size)).cpu()
    return tensors


def _matrix(target: Target, drafted: torch.Tensor | None) -> torch.Tensor:
    """[d, D] the target's head as a matrix, over the draft vocabulary.

    Raises:
        ConfigError: the head is not a matrix.
    """
    head = target.head if drafted is None else target.head_of(drafted)
    units = torch.eye(target.hidden_size, dtype=target.dtype, device=target.head_device)
    found = head(units)
    if not torch.equal(head(2 * units), 2 * found):  # a power of two rounds nothing
        raise ConfigError(
            "the target's head does more than a product (it bounds its logits), and engines take a matrix from a "
            "head's file; train a head with its own (head.own_head=true)"
        )
    return found.T.contiguous().cpu()


def _reads_as_it_is(target: Target) -> bool:
    """Whether the target's layers read its embedding unscaled."""
    return target.embedding_rows is not None


def _layers(config: HeadConfig, kind: str) -> dict[str, Any]:
    """The layers' config, in transformers' form for this kind of model."""
    values = {
        "model_type": kind,
        "hidden_size": config.width,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "max_position_embeddings": config.positions,
        "rope_parameters": dict(config.rope),
        "rope_theta": config.rope.get("rope_theta", 10000.0),
        "rope_scaling": _scaling(config.rope),
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
    }
    if kind == "llama":
        values["mlp_bias"] = config.mlp_bias
    if any(config.windows):
        values["layer_types"] = ["sliding_attention" if window else "full_attention" for window in config.windows]
        values |= {"sliding_window": max(config.windows), "use_sliding_window": True}
    return values


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary positions as transformers 4 spells them, beside ``rope_theta``; None where they are not scaled."""
    if rope.get("rope_type", "default") == "default":
        return None
    return {name: value for name, value in rope.items() if name != "rope_theta"}


def _speculators(config: HeadConfig, target: Target, verifier: str) -> dict[str, Any]:
    kind: str = asdict(config)["kind"]
    if kind not in _CLASSES or min(config.taps) < 0:
        raise ConfigError(
            f"a head of kind {kind} over hidden layers {config.taps} has no place in the layout of speculators, which "
            f"holds {', '.join(_CLASSES)} heads over layers before the last norm"
        )
    depth = config.drafted if isinstance(config, BlockConfig) else config.depth
    values: dict[str, Any] = {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",  # the version whose layout this is
        "architectures": [_CLASSES[kind]],
        "transformer_layer_config": _layers(config, "qwen3" if config.qk_norm else "llama"),
        "draft_vocab_size": config.draft_vocab or config.vocab_size,
        "target_hidden_size": None if config.hidden_size == config.width else config.hidden_size,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth or 5}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": [target.name]},
        },
    }
    return {**values, **(_chain(config) if isinstance(config, ChainConfig) else _block(config))}


def _chain(config: ChainConfig) -> dict[str, Any]:
    return {
        "eagle_aux_hidden_state_layer_ids": [*config.taps],
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "norm_before_fc": config.norm_inputs == "whole",
        "fc_norm": config.norm_inputs == "each",
        **({"mask_token_id": config.mask_token} if config.kind == "peagle" else {}),
    }


def _block(config: HeadConfig) -> dict[str, Any]:
    assert isinstance(config, BlockConfig)
    if any(config.windows) and not config.window_from_anchor:
        raise ConfigError("a block whose windows go by each row's own place has no place in the layout of speculators")
    values: dict[str, Any] = {
        "aux_hidden_state_layer_ids": [*config.taps],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": not config.window_causal,
    }
    if config.kind == "dspark":
        values |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla" if config.markov == "none" else config.markov,
            "enable_confidence_head": config.confidence != "none",
            "confidence_head_with_markov": config.confidence == "markov",
        }
    return values


def _authors(
    config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: Target
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The layout of EAGLE-3's authors: it names layers whose outputs are read, and the single layer ``midlayer``."""
    if not isinstance(config, ChainConfig) or config.kind != "eagle3" or config.layers > 1 or min(config.taps) < 1:
        raise ConfigError(
            "the layout of EAGLE-3's authors holds EAGLE-3 heads of one layer over outputs of layers, and this one is "
            f"of kind {asdict(config)['kind']}, with {config.layers} layers over hidden layers {config.taps}; take "
            "speculators"
        )
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layers(config, "llama"),
        "draft_vocab_size": config.draft_vocab or config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_target_layers": target.num_layers,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "norm_before_fc": config.norm_inputs == "whole",
        "fc_norm": config.norm_inputs == "each",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
            "use_aux_hidden_state": True,
        },
    }
    return values, {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
