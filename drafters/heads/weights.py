"""The modules that hold a head's tensors, under the names of a converted folder.

They only hold weights; :mod:`drafters.heads.forward` computes with them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drafters.heads.config import BlockConfig, ChainConfig, HeadConfig
from drafters.shared.weights import save_weights

__all__ = ["FORMAT", "WEIGHTS", "Block", "Chain", "HeadWeights"]

WEIGHTS = "model.safetensors"
FORMAT = "specdec-head"


class Norm(nn.Module):
    """The weight [D] of an RMS norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    """The projections of a layer's attention; ``inputs`` is the input width of queries, keys and values."""

    def __init__(self, config: HeadConfig, inputs: int) -> None:
        super().__init__()
        inner, inside = config.heads * config.head_dim, config.key_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, inner, bias=config.attention_bias)
        self.k_proj = nn.Linear(inputs, inside, bias=config.attention_bias)
        self.v_proj = nn.Linear(inputs, inside, bias=config.attention_bias)
        self.o_proj = nn.Linear(inner, config.width, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(config.head_dim), Norm(config.head_dim)


class MLP(nn.Module):
    """The products of a gated MLP."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, inner, bias = config.width, config.intermediate_size, config.mlp_bias
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=bias)


class Convolution(nn.Module):
    """The kernels for a layer part's inputs and outputs; each is a base plus a projection of the row."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, config.conv_kernel, config.width))
        groups = config.width // config.conv_group
        self.kernel_projection = nn.Linear(config.width, 2 * config.conv_kernel * groups, bias=False)


class Layer(nn.Module):
    """A decoder layer. A chain's ``first`` may also read embeddings; EAGLE's first layer has no input norm."""

    def __init__(self, config: HeadConfig, first: bool) -> None:
        super().__init__()
        wide = first and config.wide
        if wide or not first or isinstance(config, BlockConfig):
            self.input_layernorm = Norm(config.width)
        if wide:
            self.hidden_norm = Norm(config.width)
        self.self_attn = Attention(config, config.width * (1 + wide))
        self.post_attention_layernorm = Norm(config.width)
        self.mlp = MLP(config)
        if isinstance(config, BlockConfig) and config.conv_kernel:
            self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)


class HeadWeights(nn.Module):
    """The parts of all heads: layers, ``fc`` over ``fused`` hidden states of the target, and the draft vocabulary."""

    config: Any  # a subclass of HeadConfig, depending on the class
    draft_tokens: torch.Tensor | None  # [d] int64, ascending

    def __init__(self, config: HeadConfig, fused: int) -> None:
        super().__init__()
        self.config = config
        if fused:
            self.fc = nn.Linear(fused, config.width, bias=config.fc_bias)
        self.layers = nn.ModuleList(Layer(config, not place) for place in range(config.layers))
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        if config.own_head:
            self.lm_head = nn.Linear(config.width, config.draft_vocab or config.vocab_size, bias=False)
        self.register_buffer("draft_tokens", torch.arange(config.draft_vocab) if config.draft_vocab else None)

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a folder in specdec's format; ``dtype`` is the dtype in the file, None keeps each weight's own.

        Raises:
            CheckpointError: the files could not be written.
        """
        values = {"format": FORMAT, **asdict(self.config)}
        save_weights(Path(folder), WEIGHTS, self.state_dict(), values, what="the head", dtype=dtype)


class Chain(HeadWeights):
    """An EAGLE head of any kind."""

    config: ChainConfig

    def __init__(self, config: ChainConfig, taps: int) -> None:
        inputs = config.hidden_size * taps
        super().__init__(config, inputs + config.width if config.kind == "eagle" else inputs if config.fused else 0)
        if config.norm_inputs == "whole":
            self.input_norm = Norm(inputs)
        elif config.norm_inputs == "each":
            self.fc_norm = nn.ModuleList(Norm(config.hidden_size) for _ in range(taps))
        if config.kind != "eagle":
            self.norm = Norm(config.width)
        if config.kind == "peagle":
            self.mask_hidden = nn.Parameter(torch.zeros(inputs))


class Markov(nn.Module):
    """A low-rank bias on logits that depends on the token before."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab or config.vocab_size, bias=False)
        if config.markov == "gated":
            self.gate_proj = nn.Linear(config.width + rank, rank)
        elif config.markov == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.width, 3 * rank)


class Confidence(nn.Module):
    """A linear that gives the logit of acceptance."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.width + config.markov_rank * (config.confidence == "markov"), 1)


class Selector(nn.Module):
    """The scores of candidates behind a token, for a hidden state."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.width, config.selector_rank, bias=False)


class Block(HeadWeights):
    """A DFlash, DFlash2 or DSpark head."""

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config, config.hidden_size * len(config.taps))
        self.hidden_norm, self.norm = Norm(config.width), Norm(config.width)
        if config.markov_rank:
            self.markov_head = Markov(config)
        if config.confidence != "none":
            self.confidence_head = Confidence(config)
        if config.selector_rank:
            self.candidate_selector = Selector(config)
