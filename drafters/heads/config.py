"""Configs of heads: sizes and switches, from their tensors and ``config.json``, and kept with converted weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from drafters.shared.weights import WeightsConfig
from specdec.decoder.spec import Activation
from specdec.errors import ConfigError, check_choice, shown
from specdec.settings.validation import AtLeast1, check_fields
from specdec.target import FINAL

__all__ = ["ACTIVATIONS", "BlockConfig", "ChainConfig", "HeadConfig", "aux_layers"]

AtLeast0 = Annotated[int, Ge(0), "an integer >= 0"]
Layers = Annotated[int, Ge(1), Lt(257), "an integer from 1 to 256"]
_MOST = 1024  # most tokens of a block

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Transformers' name of an activation -> ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(WeightsConfig):
    """The fields that all heads have.

    Attributes:
        hidden_size, vocab_size, target: see :class:`drafters.shared.weights.WeightsConfig`.
        width: W, the width of the head's own hidden states.
        layers: number of decoder layers.
        heads, key_heads, head_dim: sizes of the layers' attention.
        intermediate_size: inner width of the layers' MLPs.
        taps: the target's hidden states that the head reads, each as a number of layers: 0 is the embedding's output,
            and ``FINAL`` (-1) the last norm's output. Empty: :func:`aux_layers` of the target.
        norm_eps: epsilon of the RMS norms.
        activation: transformers' name of the MLPs' activation.
        rope: ``rope_parameters`` as transformers 5 writes them.
        positions: ``max_position_embeddings``, which some kinds of rotary positions need.
        windows: attention window of each layer; 0 for none. Empty: no layer has a window.
        draft_vocab: d, size of the draft vocabulary; 0 for all tokens.
        attention_bias, output_bias, mlp_bias, fc_bias: whether these linears have biases.
        qk_norm: whether each head's queries and keys pass an RMS norm.
        own_embedding, own_head: whether the head has its own; otherwise the target's are used.
        depth: number of tokens that the head was published to draft; 0 if unknown.
        target_layers: number of layers of the target that it was trained for; 0 if unknown.
        target_name: name of that target, for information.
    """

    width: AtLeast1
    layers: Layers
    heads: AtLeast1
    key_heads: AtLeast1
    head_dim: AtLeast1
    intermediate_size: AtLeast1
    taps: list[int] = field(default_factory=list)
    norm_eps: Annotated[float, Gt(0), Lt(1), "a number > 0 and < 1"] = 1e-6
    activation: str = "silu"
    rope: dict[str, Any] = field(default_factory=dict)
    positions: AtLeast1 = 4096
    windows: list[int] = field(default_factory=list)
    draft_vocab: AtLeast0 = 0
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    own_head: bool = False
    depth: AtLeast0 = 0
    target_layers: AtLeast0 = 0
    target_name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "head.")
        check_choice("hidden_act of the head", self.activation, ACTIVATIONS)
        if self.heads % self.key_heads:
            raise ConfigError(f"head.key_heads is {shown(self.key_heads)}; it must divide {shown(self.heads)} heads")
        if self.head_dim % 2:
            raise ConfigError(f"head.head_dim is {shown(self.head_dim)}; rotary positions need an even one")
        if self.draft_vocab > self.vocab_size:
            raise ConfigError(
                f"head.draft_vocab is {shown(self.draft_vocab)}; it must be in [0, {shown(self.vocab_size)}]"
            )
        if self.windows and (len(self.windows) != self.layers or min(self.windows) < 0):
            raise ConfigError(f"head.windows is {shown(self.windows)}; one size >= 0 for each of {self.layers} layers")
        if any(tap < FINAL for tap in self.taps) or len(set(self.taps)) < len(self.taps):
            raise ConfigError(f"head.taps is {shown(self.taps)}; it takes layers of the target, each once")
        if self.width != self.hidden_size and not self.own_embedding:
            raise ConfigError(
                f"the head is {shown(self.width)} wide and its target {shown(self.hidden_size)}, so that it needs "
                f"embed_tokens.weight, [{shown(self.vocab_size)}, {shown(self.width)}], of its own"
            )
        if self.width != self.hidden_size and not self.own_head:
            raise ConfigError(
                f"the head is {shown(self.width)} wide and its target {shown(self.hidden_size)}, so that it needs "
                f"lm_head.weight, [{shown(self.draft_vocab or self.vocab_size)}, {shown(self.width)}], of its own"
            )

    @property
    def wide(self) -> bool:
        """Whether the first layer's queries, keys and values read the embedding and the hidden state side by side."""
        return False

    def window(self, layer: int) -> int | None:
        """The attention window of a layer; None where it sees everything."""
        return (self.windows[layer] or None) if self.windows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainConfig(HeadConfig):
    """EAGLE: layers that run once for each drafted token, on an embedding and the hidden state before it.

    Attributes:
        kind: ``eagle`` (EAGLE-1 and 2) reads the target's last hidden state behind its norm, and uses its head;
            ``eagle3`` reads several hidden states of the target, and mostly has its own head; ``peagle`` is an
            ``eagle3`` that drafts all depths in one pass.
        fused: whether hidden states pass ``fc``; otherwise the single tapped one is used unchanged.
        norm_inputs: the norm before ``fc``: ``none``; ``whole`` for all hidden states side by side (``input_norm``);
            ``each`` for every one alone (``fc_norm``).
        norm_before_residual: whether the residual stream starts with the normed hidden state.
        norm_output: whether the next token reads the hidden state behind the last norm; otherwise before it.
        mask_token: token that ``peagle`` embeds where the token is unknown.
    """

    kind: Literal["eagle", "eagle3", "peagle"]
    fused: bool = True
    norm_inputs: Literal["none", "whole", "each"] = "none"
    norm_before_residual: bool = False
    norm_output: bool = False
    mask_token: AtLeast0 = 0

    @property
    def wide(self) -> bool:
        return self.kind != "eagle"

    @property
    def at_once(self) -> bool:
        """Whether all depths are drafted in one pass."""
        return self.kind == "peagle"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(HeadConfig):
    """DFlash: layers that run once for a block of masks behind the last token; its rows attend to the text and block.

    Attributes:
        kind: ``dflash``; ``dflash2``, with convolutions around each layer's parts and a selector among candidates;
            ``dspark``, with a bias that depends on the token before, and a head that estimates acceptance.
        block_size: B, rows of a block, the last token's included.
        mask_token: token that all other rows embed.
        from_anchor: whether each row proposes the token behind it, the last token's row included, B tokens in all;
            otherwise each mask proposes its own token, B - 1 in all.
        window_causal: whether rows of a layer with a window see no later rows of the block.
        window_from_anchor: whether all rows see as far back as the last token does; otherwise each has its own window.
        final_normed: whether the hidden state behind all layers is taken after the last norm.
        markov: how the bias that depends on the token before is computed.
        markov_rank: rank of that bias; 0 without one.
        confidence: input of the head that estimates acceptance: ``hidden`` states, or also the bias's embedding
            (``markov``).
        conv_kernel, conv_group: taps of the convolutions, and channels that share a kernel; 0 without convolutions.
        selector_rank, selector_top: rank of the selector, and number of candidates that it scores; 0 without one.
    """

    kind: Literal["dflash", "dflash2", "dspark"]
    block_size: AtLeast1
    mask_token: AtLeast0
    from_anchor: bool = False
    window_causal: bool = False
    window_from_anchor: bool = False
    final_normed: bool = False
    markov: Literal["none", "vanilla", "gated", "rnn"] = "none"
    markov_rank: AtLeast0 = 0
    confidence: Literal["none", "hidden", "markov"] = "none"
    conv_kernel: AtLeast0 = 0
    conv_group: AtLeast0 = 0
    selector_rank: AtLeast0 = 0
    selector_top: AtLeast0 = 0

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        if not 2 - self.from_anchor <= self.block_size <= _MOST:
            raise ConfigError(f"head.block_size is {shown(self.block_size)}; it must be in [2, {_MOST}]")
        if self.mask_token >= self.vocab_size:
            raise ConfigError(
                f"head.mask_token is {shown(self.mask_token)}; it must be a token, in [0, {shown(self.vocab_size)})"
            )
        if not self.taps:
            raise ConfigError("head.taps is empty; a block's config names the target's layers (target_layer_ids)")
        if (self.markov == "none") != (self.markov_rank == 0) or (self.confidence == "markov" and not self.markov_rank):
            raise ConfigError(
                f"head.markov is {self.markov!r}, markov_rank {shown(self.markov_rank)} and confidence "
                f"{self.confidence!r}; without a rank there is no such bias"
            )
        if self.markov == "rnn" and not self.from_anchor:
            raise ConfigError(
                "head.markov is 'rnn' and from_anchor (sample_from_anchor) false; that bias begins with the last token"
            )
        if self.conv_kernel and (self.conv_kernel > self.block_size or self.width % max(self.conv_group, 1)):
            raise ConfigError(
                f"head.conv_kernel is {shown(self.conv_kernel)} and conv_group {shown(self.conv_group)}; the first is "
                f"at most the block's {self.block_size} rows, and the second divides the width of {self.width}"
            )

    @property
    def drafted(self) -> int:
        """The number of tokens that a block proposes."""
        return self.block_size - (not self.from_anchor)

    def spans(self, layer: int, end: int) -> list[tuple[int, int]]:
        """The positions [first, last) that each row of a block sees in a layer, if the block ends at ``end``."""
        window, anchor = self.window(layer), end - self.block_size
        if window is None:
            return [(0, end)] * self.block_size
        found = list[tuple[int, int]]()
        for own in range(anchor, end):
            first = (anchor if self.window_from_anchor else own) - window
            last = own + 1 if self.window_causal else end if self.window_from_anchor else min(own + window + 1, end)
            found.append((max(first, 0), last))
        return found


def aux_layers(layers: int) -> list[int]:
    """The hidden states that EAGLE-3 reads by default, for a target with this number of layers."""
    return sorted({2, layers // 2, max(layers - 3, 0)})
