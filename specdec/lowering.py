"""Lowering: a decoder layer of a known class as the few operations that it is.

On a CPU, and for small models anywhere, most of a transformers layer's time is what surrounds the matrix products. A
lowered layer computes the same with half the operations: one product for queries, keys and values and one for gate and
up, fused norms, rotary on queries and keys at once, residuals added by the product itself, keys and values written
straight into their slots. The original's parameters become views of the fused ones, so that no weight is held twice and
the model itself goes on working. Layers of other classes, quantised, offloaded or hooked ones are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specdec.attention import attend
from specdec.block import Block
from specdec.errors import ConfigError

__all__ = ["LoweredLayer", "check_optimize", "lower"]

_KNOWN = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)


def check_optimize(choice: str) -> str:
    """The choice, if it is one.

    Raises:
        ConfigError: it is none.
    """
    if choice not in ("auto", "off"):
        raise ConfigError(f"optimize={choice!r} is unknown; choose auto or off")
    return choice


def lower(layer: nn.Module) -> LoweredLayer | None:
    """The layer's lean equivalent, or None where it has to stay as it is."""
    if type(layer) not in _KNOWN or any(_is_special(module) for module in layer.modules()):
        return None
    weights = list(layer.parameters())
    if len({(w.dtype, w.device) for w in weights}) != 1 or weights[0].device.type == "meta":
        return None
    activation = getattr(layer.mlp, "act_fn", None)
    if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation":
        return None
    return LoweredLayer(layer)


def _is_special(module: nn.Module) -> bool:
    """Whether a module does more than its class says: accelerate's or a user's hooks, or a quantised linear."""
    hooked = hasattr(module, "_hf_hook") or bool(module._forward_hooks or module._forward_pre_hooks)
    return hooked or (isinstance(module, nn.Linear) and type(module) is not nn.Linear)


class LoweredLayer:
    """A Llama-like layer: attention with rotary positions (and Qwen 3's norms per head), gated SiLU MLP.

    Called by the walk as the original is; ``hidden`` is [1, T, D].
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.number: int = attention.layer_idx
        self.scale: float = attention.scaling
        self.head_dim: int = attention.head_dim
        self.key_heads: int = attention.k_proj.out_features // self.head_dim
        self.query_heads: int = attention.q_proj.out_features // self.head_dim
        self.qkv, self.qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, self.gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj])
        self.out, self.out_bias = attention.o_proj.weight.t(), attention.o_proj.bias
        self.down, self.down_bias = mlp.down_proj.weight.t(), mlp.down_proj.bias
        self.norms = [(n.weight, n.variance_epsilon) for n in (layer.input_layernorm, layer.post_attention_layernorm)]
        self.head_norm: torch.Tensor | None = None
        if hasattr(attention, "q_norm"):
            heads = [attention.q_norm.weight] * self.query_heads + [attention.k_norm.weight] * self.key_heads
            self.head_norm = torch.stack(heads).unsqueeze(1)  # [Hq + Hkv, 1, head_dim]
            self.head_epsilon: float = attention.q_norm.variance_epsilon

    def __call__(
        self,
        hidden: torch.Tensor,
        *,
        block: Block,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        rows, rotated = hidden.shape[1], self.query_heads + self.key_heads
        residual = hidden[0]  # [T, D]
        weight, epsilon = self.norms[0]
        normed = F.rms_norm(residual, weight.shape, weight, epsilon)
        heads = F.linear(normed, self.qkv, self.qkv_bias).view(rows, -1, self.head_dim).transpose(0, 1)  # [H, T, d]
        turned = self._rotate(heads[:rotated], block, *position_embeddings)
        values = heads[rotated:].unsqueeze(0)
        block.update(turned[:, self.query_heads :], values, self.number)
        mixed = attend(turned[:, : self.query_heads], block, self.number, self.scale)  # [1, Hq, T, d]
        mixed = mixed[0].transpose(0, 1).reshape(rows, -1)
        residual = torch.addmm(residual, mixed, self.out)
        if self.out_bias is not None:
            residual += self.out_bias
        weight, epsilon = self.norms[1]
        normed = F.rms_norm(residual, weight.shape, weight, epsilon)
        gate, up = F.linear(normed, self.gate_up, self.gate_up_bias).chunk(2, -1)
        residual = torch.addmm(residual, F.silu(gate).mul_(up), self.down)
        if self.down_bias is not None:
            residual += self.down_bias
        return residual.unsqueeze(0)

    def _rotate(self, heads: torch.Tensor, block: Block, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[1, Hq + Hkv, T, d]: queries and keys, normed where the model does, at their rotary positions."""
        if self.head_norm is not None:
            heads = F.rms_norm(heads, (self.head_dim,), None, self.head_epsilon) * self.head_norm
        # Halves swapped and the first negated: a roll, with the sign moved into the sines once per step.
        swapped = heads.roll(self.head_dim // 2, -1)
        return torch.addcmul(heads * cos, swapped, block.signed(sin)).unsqueeze(0)


def _fuse(parts: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight (and bias) for several linears of one input; theirs become views of it."""
    fused = torch.cat([part.weight.data for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    start = 0
    for part in parts:
        stop = start + part.out_features
        part.weight.data = fused[start:stop]
        if bias is not None:
            part.bias.data = bias[start:stop]
        start = stop
    return fused, bias
