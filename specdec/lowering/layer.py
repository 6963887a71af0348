"""A decoder layer of a known class as the few operations that it is.

A lowered layer computes what the original does with a third of the operations: one product for queries, keys and values
and one for gate and up, lean norms, rotary on queries and keys at once, residuals added by the product itself, keys and
values written straight into their slots. Layers of other classes, quantised, offloaded or hooked ones stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from specdec.errors import ConfigError
from specdec.lowering.pages import forget
from specdec.lowering.parts import Rows, Site
from specdec.lowering.products import PRODUCTS, Linear, Product, fuse

__all__ = ["LoweredHead", "LoweredLayer", "LoweredNorm", "check_optimize", "lower", "lower_head", "lower_norm"]

Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]

_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


def check_optimize(choice: str) -> str:
    """The choice, if it is one.

    Raises:
        ConfigError: it is none.
    """
    if choice not in ("auto", "off"):
        raise ConfigError(f"optimize={choice!r} is unknown; choose auto or off")
    return choice


def lower(layer: nn.Module, *, owned: bool = False) -> LoweredLayer | None:
    """The layer's lean equivalent, or None where it has to stay as it is; ``owned`` as in :func:`fuse`."""
    if type(layer) not in _LAYERS or any(_is_special(module) for module in layer.modules()):
        return None
    weights = list(layer.parameters())
    if len({(w.dtype, w.device) for w in weights}) != 1 or weights[0].device.type == "meta":
        return None
    activation = getattr(layer.mlp, "act_fn", None)
    if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation":
        return None
    return LoweredLayer(layer, owned)


def lower_norm(norm: nn.Module) -> LoweredNorm | None:
    """A last norm's lean equivalent, or None where it has to stay as it is."""
    if type(norm) not in _NORMS or _is_special(norm) or norm.weight.device.type == "meta":
        return None
    return LoweredNorm(norm)


def lower_head(model: nn.Module, head: nn.Module, embedding: nn.Module) -> LoweredHead | None:
    """The head's product and place, or None where it has to stay as it is."""
    if type(head) is not nn.Linear or _is_special(head) or head.weight.device.type == "meta":
        return None
    site, tied = Site.of(head, model), getattr(embedding, "weight", None) is head.weight
    shared = Site.of(embedding, model) if tied and type(embedding) is nn.Embedding else None
    if site is None or (tied and (shared is None or _is_special(embedding))):
        return None
    return LoweredHead(Linear(head.weight.data, None if head.bias is None else head.bias.data), site, shared)


@dataclass(frozen=True, slots=True)
class LoweredHead:
    """A head's product and where it hangs; ``shared``: the embedding that reads the same weight, if one does."""

    product: Linear
    site: Site
    shared: Site | None

    def use(self, kernel: str, *, owned: bool) -> Product | None:
        """Store the weight as this kernel wants it; None, and all as it was, where an embedding could not read it."""
        if kernel == "linear" or (self.shared is not None and kernel != "tiled"):
            return None if self.shared is not None else self.product
        stored: Any = PRODUCTS[kernel](self.product.weight, self.product.bias)
        stored.install([self.site])
        if self.shared is not None:
            setattr(self.shared.owner, self.shared.name, Rows(stored))
        if owned:
            forget(self.product.weight)
        return stored  # type: ignore[no-any-return]


def _is_special(module: nn.Module) -> bool:
    """Whether a module does more than its class says: accelerate's or a user's hooks, or a quantised linear."""
    hooked = hasattr(module, "_hf_hook") or bool(module._forward_hooks or module._forward_pre_hooks)
    return hooked or (isinstance(module, nn.Linear) and type(module) is not nn.Linear)


class LoweredNorm:
    """RMS norm. On a CPU in full precision as four operations; torch's own is one call made of nine."""

    def __init__(self, norm: Any) -> None:
        self.weight, self.epsilon = norm.weight.data, norm.variance_epsilon
        self._lean = self.weight.device.type == "cpu" and self.weight.dtype in (torch.float32, torch.float64)
        if self._lean:
            # x w / sqrt(|x|^2 / D + e) = x (w sqrt D) / hypot(|x|, sqrt(D e))
            size = self.weight.shape[0]
            self._scaled = self.weight * math.sqrt(size)
            self._floor = torch.tensor(math.sqrt(size * self.epsilon), dtype=self.weight.dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] normed over the last dimension."""
        if not self._lean:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        normed: torch.Tensor = (hidden * self._scaled).div_(length.hypot_(self._floor))
        return normed


class LoweredLayer:
    """A Llama-like layer: attention with rotary positions (and Qwen 3's norms per head), gated SiLU MLP.

    Until ``use`` says otherwise its products are ``linear`` and share their weights with the original.
    """

    def __init__(self, layer: Any, owned: bool = False) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.number: int = attention.layer_idx
        self.scale: float = attention.scaling
        self.head_dim: int = attention.head_dim
        self.key_heads: int = attention.k_proj.out_features // self.head_dim
        self.query_heads: int = attention.q_proj.out_features // self.head_dim
        self._sites = (
            [Site(attention, name) for name in ("q_proj", "k_proj", "v_proj")],
            [Site(attention, "o_proj")],
            [Site(mlp, name) for name in ("gate_proj", "up_proj")],
            [Site(mlp, "down_proj")],
        )
        self.products: list[Product] = [fuse(sites, owned=owned) for sites in self._sites]
        self._owned = owned
        self.weights = [product.weight for product in self.products if isinstance(product, Linear)]
        self.first_norm, self.second_norm = (
            LoweredNorm(layer.input_layernorm),
            LoweredNorm(layer.post_attention_layernorm),
        )
        self.head_norm: torch.Tensor | None = None
        self.head_epsilon = 0.0
        if hasattr(attention, "q_norm"):
            heads = [attention.q_norm.weight.data] * self.query_heads + [attention.k_norm.weight.data] * self.key_heads
            self.head_norm = torch.stack(heads).unsqueeze(1)  # [Hq + Hkv, 1, head_dim]
            self.head_epsilon = attention.q_norm.variance_epsilon

    def use(self, kernels: Mapping[tuple[int, ...], str]) -> None:
        """Store the weights as these kernels want them; the original keeps its own until ``install``."""
        for place, product in enumerate(self.products):
            kernel = kernels.get(tuple(product.weight.shape), "linear") if isinstance(product, Linear) else "linear"
            if kernel != "linear":
                self.products[place] = PRODUCTS[kernel](product.weight, product.bias)  # type: ignore[attr-defined]

    def install(self) -> None:
        """Have the original read this layer's weights, so that none is held twice."""
        for product, weight, sites in zip(self.products, self.weights, self._sites, strict=True):
            product.install(sites)
            if self._owned and not (isinstance(product, Linear) and product.weight is weight):
                forget(weight)
        self.weights = []

    def __call__(self, residual: torch.Tensor, mix: Mix, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        """[T, D] to [T, D]; ``cos`` and ``signed_sin`` [T, head_dim], the sines' first half negated.

        ``mix`` is attention: queries, keys, values [1, heads, T, head_dim], number and scale to [1, Hq, T, head_dim].
        """
        qkv, out, gate_up, down = self.products
        rows, rotated = residual.shape[0], self.query_heads + self.key_heads
        heads = qkv(self.first_norm(residual)).view(1, rows, -1, self.head_dim).transpose(1, 2)  # [1, H, T, d]
        turned = self._rotate(heads[:, :rotated], cos, signed_sin)
        query, keys, values = turned[:, : self.query_heads], turned[:, self.query_heads :], heads[:, rotated:]
        mixed = mix(query, keys, values, self.number, self.scale)  # [1, Hq, T, d]
        residual = out.add(mixed.transpose(1, 2).reshape(rows, -1), residual)
        gate, up = gate_up(self.second_norm(residual)).chunk(2, -1)
        return down.add(F.silu(gate).mul_(up), residual)

    def _rotate(self, heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        """[1, Hq + Hkv, T, d]: queries and keys, normed where the model does, at their rotary positions."""
        if self.head_norm is not None:
            heads = F.rms_norm(heads, (self.head_dim,), None, self.head_epsilon) * self.head_norm
        # Halves swapped and the first negated: a roll, with the sign moved into the sines.
        swapped = heads.roll(self.head_dim // 2, -1)
        return torch.addcmul(heads * cos, swapped, signed_sin)
