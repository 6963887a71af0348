"""Running a head's layers for a few rows of each sequence; keys and values are cached in slots as a target's are.

Weights have the layout of this machine's fastest kernel, see :mod:`specdec.runners.linear`. Keys and values are one
product, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.heads.config import HeadConfig
from drafters.heads.weights import HeadWeights, Layer
from specdec.errors import CheckpointError, first_line, shown
from specdec.runners.linear import DenseLinear, LinearKernel, PackedWeight, Tokens, linear_kernel
from specdec.runners.rotary import Rotary, rotate
from specdec.step import device_copies
from specdec.step.cache import LayerSpec
from specdec.target import Target

__all__ = ["LayerStep", "Norm", "embedding_of", "embedding_rows", "normed", "product", "rotary_of", "specs_of"]

Linear = Callable[[torch.Tensor], torch.Tensor]
Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def product(*parts: nn.Linear) -> LinearKernel:
    """One product for several linears with the same input."""
    return linear_kernel(*_joined(parts))


def _joined(parts: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights, and the biases, of several linears."""
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat([bias.detach() for bias in biases]) if biases else None
    return torch.cat([part.weight.detach() for part in parts]), bias


def normed(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., D] RMS norm of states; half-precision states are normed in float32, as in the authors' code."""
    if hidden.dtype in (torch.bfloat16, torch.float16):
        return weight * F.rms_norm(hidden.float(), weight.shape, None, eps).to(hidden.dtype)
    return F.rms_norm(hidden, weight.shape, weight, eps)


class LayerStep:
    """One layer.

    Args:
        layer: its weights; not needed afterwards.
        config: the head's config.

    Attributes:
        head_norms: weights of the norms of each head's queries and keys, and their epsilon; None without.
    """

    def __init__(self, layer: Layer, config: HeadConfig) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._config = config
        parts, inner = (attention.q_proj, attention.k_proj, attention.v_proj), config.heads * config.head_dim
        self._qkv: LinearKernel | None = None
        self._q: LinearKernel
        self._kv: LinearKernel
        if device_copies.is_apart(attention.q_proj.weight.device):  # one product there, whose parts are views
            self._qkv = whole = DenseLinear(*_joined(parts))
            cuts = slice(inner), slice(inner, None)
            both = [(whole.weight[own], None if whole.bias is None else whole.bias[own]) for own in cuts]
            self._q, self._kv = (DenseLinear(*one) for one in both)
        else:
            self._q, self._kv = product(parts[0]), product(*parts[1:])
        self._out = product(attention.o_proj)
        self._gate_up, self._down = product(mlp.gate_proj, mlp.up_proj), product(mlp.down_proj)
        self.head_norms: tuple[torch.Tensor, torch.Tensor, float] | None = None
        if config.qk_norm:
            self.head_norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach(), config.norm_eps
        self._activation = ACT2FN[config.activation]

    def queries(self, inputs: torch.Tensor, angles: Sequence[torch.Tensor]) -> torch.Tensor:
        """[1, Hq, T, d] rotated queries of ``inputs`` [T, ...]; ``angles``: [T, d] cosines and signed sines."""
        heads = self._split(self._q(inputs))
        return rotate(self._head_normed(heads, 0), *angles)[None]

    def keys_values(self, inputs: torch.Tensor, angles: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, [1, Hk, T, d] each."""
        keys, values = self._split(self._kv(inputs)).chunk(2)
        return rotate(self._head_normed(keys, 1), *angles)[None], values[None]

    def heads(self, inputs: torch.Tensor) -> torch.Tensor:
        """[T, (Hq + 2 Hk) d] queries, keys and values, not normed or rotated yet."""
        return torch.cat((self._q(inputs), self._kv(inputs)), -1) if self._qkv is None else self._qkv(inputs)

    def attended(self, found: torch.Tensor) -> torch.Tensor:
        """[T, D] the output projection of attention outputs [1, Hq, T, d]."""
        return self.projected(found[0].transpose(0, 1).flatten(1))

    def projected(self, mixed: torch.Tensor) -> torch.Tensor:
        """[T, D] the output projection of attention outputs [T, Hq d]."""
        return self._out(mixed)

    def mlp(self, inputs: torch.Tensor) -> torch.Tensor:
        """[T, D] the MLP's output for normed states."""
        gate, up = self._gate_up(inputs).chunk(2, -1)
        return self._down(self._activation(gate) * up)

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        """[T, heads x d] to [heads, T, d]."""
        return states.view(len(states), -1, self._config.head_dim).transpose(0, 1)

    def _head_normed(self, heads: torch.Tensor, which: int) -> torch.Tensor:
        if self.head_norms is None:
            return heads
        return normed(heads, self.head_norms[:2][which], self._config.norm_eps)


def rotary_of(config: HeadConfig, device: torch.device) -> Rotary:
    """The rotary positions of a head.

    Raises:
        CheckpointError: transformers does not know their kind.
    """
    try:
        like = LlamaConfig(
            hidden_size=config.heads * config.head_dim,
            num_attention_heads=config.heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.positions,
            rope_parameters=dict(config.rope) or None,
        )
        return Rotary(LlamaRotaryEmbedding(like).to(device), like)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the head's rotary positions, {shown(config.rope)}, are of no kind that transformers knows "
            f"({first_line(error)}); they stand as rope_theta, rope_scaling or rope_parameters in its config.json"
        ) from error


def specs_of(config: HeadConfig, device: torch.device, dtype: torch.dtype, *, windows: bool = True) -> list[LayerSpec]:
    """What each layer caches; with ``windows`` False all layers cache the whole text, whatever their window."""
    size = config.head_dim
    return [
        LayerSpec(config.key_heads, size, size, config.window(layer) if windows else None, device, dtype)
        for layer in range(config.layers)
    ]


def embedding_of(head: HeadWeights, target: Target) -> Callable[[Tokens | torch.Tensor], torch.Tensor]:
    """The function from tokens [N] to embeddings [N, D]: the head's own embedding, or else the target's.

    Tokens may be a tensor on a device.
    """
    if not head.config.own_embedding:
        return target.embed
    weight = head.embed_tokens.weight.detach()

    def embed(tokens: Tokens | torch.Tensor) -> torch.Tensor:
        if not isinstance(tokens, torch.Tensor):
            tokens = torch.tensor([*tokens], device=weight.device)
        return weight[tokens.to(weight.device)]

    return embed


def embedding_rows(head: HeadWeights, target: Target, dtype: torch.dtype) -> PackedWeight | torch.Tensor | None:
    """The weight [V, D] that :func:`embedding_of` only looks up, for the native library; None where it does more."""
    found = head.embed_tokens.weight.detach() if head.config.own_embedding else target.embedding_rows
    if found is None or found.dtype is not dtype:
        return None
    if isinstance(found, torch.Tensor) and not (found.device.type == "cpu" and found.is_contiguous()):
        return None
    return found
