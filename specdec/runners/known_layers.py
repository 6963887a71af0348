"""Known layers: the parts of a decoder layer like Llama's, if the layer is exactly of a known class.

Only exact classes count, with plain parameters, no hooks and no replaced ``forward``: a layer that a user, peft,
accelerate or a quantiser changed is run by its own modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralMLP,
    MistralRMSNorm,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

__all__ = ["KnownLayer", "UnknownModule", "hooks_in", "stacked", "why_special"]

# Linears that share their input.
_LINEARS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
# Class of a layer -> those of its attention, MLP and norms, and whether queries and keys are normed.
_LAYERS: dict[type[nn.Module], tuple[Any, Any, Any, bool]] = {
    LlamaDecoderLayer: (LlamaAttention, LlamaMLP, LlamaRMSNorm, False),
    MistralDecoderLayer: (MistralAttention, MistralMLP, MistralRMSNorm, False),
    Qwen2DecoderLayer: (Qwen2Attention, Qwen2MLP, Qwen2RMSNorm, False),
    Qwen3DecoderLayer: (Qwen3Attention, Qwen3MLP, Qwen3RMSNorm, True),
    qwen3_moe.Qwen3MoeDecoderLayer: (
        qwen3_moe.Qwen3MoeAttention,
        qwen3_moe.Qwen3MoeMLP,
        qwen3_moe.Qwen3MoeRMSNorm,
        True,
    ),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Where transformers' hooks come from that look at what a module gives, once a user has asked for hidden states.
_LOOKS = ("transformers.utils.output_capturing", "specdec.runners.whole_model")


class UnknownModule(Exception):
    """A module that only its own code can run; the message has its name and the reason."""


def hooks_in(table: Mapping[int, Any]) -> list[Any]:
    """The hooks in a module's table, without those that change nothing and look only while the model itself is called:
    transformers leaves them in a model that was asked for hidden states or attentions, and ``modules`` asks the norm.
    """
    return [hook for hook in table.values() if getattr(hook, "__module__", None) not in _LOOKS]


def why_special(module: nn.Module) -> str | None:
    """How a module differs from its class, or None: hooks, a replaced ``forward``, or weights that are not plain.

    DTensors, quantised weights and other tensor subclasses are not plain parameters.
    """
    for name, parameter in module._parameters.items():
        if parameter is None or (type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor):
            continue
        # Checked first: libraries that split weights over devices replace their modules' forward as well.
        return f"has a {name} that is a {type(parameter.data).__name__}"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if hasattr(module, "_hf_hook") or any(hooks_in(getattr(module, name, {})) for name in _HOOKS):
        return "has hooks"
    if "parametrizations" in module._modules:
        return "is parametrized"
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter.is_meta:
            return f"has its {name} offloaded"
        if not parameter.is_floating_point():
            return f"has a {name} of {parameter.dtype}"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class KnownLayer:
    """A Llama-like layer: attention with rotary positions (and Qwen 3's norms per head), gated SiLU MLP.

    Attributes:
        number: its place in the decoder.
        linears: of queries, keys and values; after attention; gate and up; and down. Each group shares its input.
        norms: before attention, and before the MLP.
        head_norms: of each query and of each key head, or none.
        query_heads, key_heads, head_dim: of attention.
        scale: of attention's scores.
    """

    number: int
    linears: tuple[tuple[Any, ...], ...]
    norms: tuple[Any, Any]
    head_norms: tuple[Any, ...]
    query_heads: int
    key_heads: int
    head_dim: int
    scale: float

    @classmethod
    def of(cls, layer: Any, number: int) -> KnownLayer:
        """Read a layer.

        Raises:
            UnknownModule: it is not of a known class, or a part of it differs from its class.
        """
        where = f"layer {number}"
        if type(layer) not in _LAYERS:
            raise UnknownModule(f"{where} is a {type(layer).__name__}")
        attention, mlp, norm, normed = _LAYERS[type(layer)]
        norms = (*_NORMS, *(_HEAD_NORMS if normed else ()))
        wanted: dict[str, Any] = {"": type(layer), "self_attn": attention, "mlp": mlp}
        wanted |= dict.fromkeys(chain.from_iterable(_LINEARS), nn.Linear) | dict.fromkeys(norms, norm)
        found = dict(layer.named_modules())
        for name, module in found.items():
            if (special := why_special(module)) is not None:
                raise UnknownModule(f"{where}: {name or 'itself'} ({type(module).__name__}) {special}")
            if name != "mlp.act_fn" and type(module) is not wanted.get(name):
                raise UnknownModule(f"{where}: {name} is a {type(module).__name__}")
        activation = found.get("mlp.act_fn")
        if type(activation) not in (nn.SiLU, SiLUActivation):
            raise UnknownModule(f"{where}: mlp.act_fn is a {type(activation).__name__}")
        if len({(weight.dtype, weight.device) for weight in layer.parameters()}) != 1:
            raise UnknownModule(f"{where} has weights of several dtypes or devices")
        own = layer.self_attn
        return cls(
            number=number,
            linears=tuple(tuple(found[name] for name in group) for group in _LINEARS),
            norms=(found[_NORMS[0]], found[_NORMS[1]]),
            head_norms=tuple(found[name] for name in _HEAD_NORMS if normed),
            query_heads=own.q_proj.out_features // own.head_dim,
            key_heads=own.k_proj.out_features // own.head_dim,
            head_dim=own.head_dim,
            scale=own.scaling,
        )

    def head_norm(self) -> tuple[torch.Tensor, float] | None:
        """Weights [Hq + Hkv, 1, head_dim] and epsilon of the norms per head, where the layer has them."""
        if not self.head_norms:
            return None
        query, key = (norm.weight.data for norm in self.head_norms)
        stack = [query] * self.query_heads + [key] * self.key_heads
        return torch.stack(stack).unsqueeze(1), self.head_norms[0].variance_epsilon


def stacked(linears: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights [sum of out, in] and biases of linears of one input, one above the other; a lone one's own."""
    if len(linears) == 1:
        return linears[0].weight.data, None if linears[0].bias is None else linears[0].bias.data
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    return torch.cat([linear.weight.data for linear in linears]), torch.cat(biases) if biases else None
