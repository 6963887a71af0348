"""Known layers: the parts of a decoder layer like Llama's or Gemma's, if the layer is exactly of a known class.

Only exact classes count, with plain parameters, no hooks and no replaced ``forward``: a layer that a user, peft,
accelerate or a quantiser changed is run by its own modules. Later changes are noticed
(:mod:`specdec.runners.snapshot`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralMLP,
    MistralRMSNorm,
)
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from specdec.runners.block_weight import BlockWeight
from specdec.runners.experts import MIXTURES, KnownExperts, PackedExperts, fits
from specdec.runners.linear import ModuleRef, PackedLinear

__all__ = [
    "KnownHead",
    "KnownLayer",
    "UnknownModule",
    "gain",
    "gains",
    "hooks_in",
    "in_blocks",
    "is_known_norm",
    "stacked",
    "why_special",
]

_NORMS = (
    *(LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm),
    *(mixtral.MixtralRMSNorm, olmoe.OlmoeRMSNorm, qwen3_moe.Qwen3MoeRMSNorm),
)
# Linears that share their input.
_ATTENTION = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",))
_MLP = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
# Norms that multiply by one more than their weight.
_FROM_ONE = (gemma.GemmaRMSNorm, gemma2.Gemma2RMSNorm, gemma3.Gemma3RMSNorm)
# Class of a module -> that of one in its place whose weights are in blocks.
_PACKED: dict[Any, type[nn.Module]] = {nn.Linear: PackedLinear}
_PACKED |= dict.fromkeys((mixture.experts for mixture in MIXTURES.values()), PackedExperts)
# Embeddings that multiply what they look up; not every version of transformers has all of these classes.
_SCALED = tuple(
    getattr(module, f"{name}TextScaledWordEmbedding")
    for module, name in ((gemma, "Gemma"), (gemma2, "Gemma2"), (gemma3, "Gemma3"))
    if hasattr(module, f"{name}TextScaledWordEmbedding")
)


class _Made(NamedTuple):
    """The exact classes of a layer's parts, and the names of its norms.

    In the place of an MLP of the class ``mlp``, if it can have one, a layer may have the mixture ``block``.
    """

    attention: type[nn.Module]
    mlp: type[nn.Module] | None
    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, ...] = ()  # of what attention and the MLP add
    heads: tuple[str, ...] = ()
    capped: bool = False  # Gemma 3 has the number, too, and makes no use of it
    block: type[nn.Module] | None = None
    norms_all: bool = False  # the norms `heads` are of all queries and of all keys


_AROUND: dict[str, Any] = {
    "before": ("input_layernorm", "pre_feedforward_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
_LAYERS: dict[type[nn.Module], _Made] = {
    LlamaDecoderLayer: _Made(LlamaAttention, LlamaMLP),
    MistralDecoderLayer: _Made(MistralAttention, MistralMLP),
    Qwen2DecoderLayer: _Made(Qwen2Attention, Qwen2MLP),
    Qwen3DecoderLayer: _Made(Qwen3Attention, Qwen3MLP, heads=_HEAD_NORMS),
    gemma.GemmaDecoderLayer: _Made(gemma.GemmaAttention, gemma.GemmaMLP),
    gemma2.Gemma2DecoderLayer: _Made(gemma2.Gemma2Attention, gemma2.Gemma2MLP, **_AROUND, capped=True),
    gemma3.Gemma3DecoderLayer: _Made(gemma3.Gemma3Attention, gemma3.Gemma3MLP, **_AROUND, heads=_HEAD_NORMS),
}
_LAYERS |= {
    mixtral.MixtralDecoderLayer: _Made(mixtral.MixtralAttention, None, block=mixtral.MixtralSparseMoeBlock),
    olmoe.OlmoeDecoderLayer: _Made(
        olmoe.OlmoeAttention, None, heads=_HEAD_NORMS, block=olmoe.OlmoeSparseMoeBlock, norms_all=True
    ),
    qwen3_moe.Qwen3MoeDecoderLayer: _Made(
        qwen3_moe.Qwen3MoeAttention,
        qwen3_moe.Qwen3MoeMLP,
        heads=_HEAD_NORMS,
        block=qwen3_moe.Qwen3MoeSparseMoeBlock,
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


def in_blocks(module: nn.Module) -> bool:
    """Whether a module is a linear, or experts, whose weights stay in a file's quantised blocks."""
    if not isinstance(module, PackedLinear | PackedExperts):
        return False
    return all(isinstance(store, BlockWeight) for store in module.stores)


def is_known_norm(norm: nn.Module) -> bool:
    """Whether a module is a plain RMS norm."""
    return type(norm) in _NORMS and why_special(norm) is None


def gain(norm: Any) -> tuple[torch.Tensor, float] | None:
    """What an RMS norm multiplies by, [D], and its epsilon; None where it is not of a known class."""
    if why_special(norm) is not None or type(norm) not in (*_NORMS, *_FROM_ONE):
        return None
    if type(norm) in _FROM_ONE:
        return 1 + norm.weight.data.float(), norm.eps
    return norm.weight.data, norm.variance_epsilon


def gains(norms: Sequence[Any]) -> list[tuple[torch.Tensor, float]]:
    """:func:`gain` of norms that are known."""
    return [known for norm in norms if (known := gain(norm)) is not None]


@dataclass(frozen=True, slots=True, eq=False)
class KnownLayer:
    """A Llama-like layer: attention with rotary positions (and Qwen 3's norms per head), gated SiLU MLP; or Gemma's.

    It may have experts in the place of one MLP.

    Attributes:
        module: the layer itself.
        number: its place in the decoder.
        linears: of queries, keys and values; after attention; and of one MLP, gate and up; and down. Each group shares
            its input.
        experts: in the place of one MLP, or None.
        norms: before attention, and before the MLP.
        after: norms of what attention and the MLP add, or none.
        head_norms: of each query and of each key head, or none.
        norms_all: these are of all queries and of all keys together.
        query_heads, key_heads, head_dim: of attention.
        scale: of attention's scores.
        cap: of these scores, by a tanh; 0 for none.
        gelu: the MLP's gate is a GELU by its tanh.
    """

    module: nn.Module
    number: int
    linears: tuple[tuple[ModuleRef, ...], ...]
    experts: KnownExperts | None
    norms: tuple[Any, Any]
    after: tuple[Any, ...]
    head_norms: tuple[Any, ...]
    norms_all: bool
    query_heads: int
    key_heads: int
    head_dim: int
    scale: float
    cap: float
    gelu: bool

    @classmethod
    def of(cls, layer: Any, number: int) -> KnownLayer:
        """Read a layer.

        Raises:
            UnknownModule: it is not of a known class, or a part of it differs from its class.
        """
        where = f"layer {number}"
        if type(layer) not in _LAYERS:
            raise UnknownModule(f"{where} is a {type(layer).__name__}")
        made = _LAYERS[type(layer)]
        norms = (*made.before, *made.after, *made.heads)
        mixed = type(layer.mlp) is made.block
        groups = _ATTENTION if mixed else (*_ATTENTION, *_MLP)
        names, activates = [*chain.from_iterable(groups)], "mlp.experts.act_fn" if mixed else "mlp.act_fn"
        mlp: Any = made.block if mixed else made.mlp
        wanted: dict[str, Any] = {"": type(layer), "self_attn": made.attention, "mlp": mlp}
        wanted |= dict.fromkeys(names, nn.Linear) | dict.fromkeys(norms, type(layer.input_layernorm))
        if mixed:
            wanted |= zip(("mlp.gate", "mlp.experts"), MIXTURES[mlp], strict=True)
        found = dict(layer.named_modules())
        for name, module in found.items():
            if (special := why_special(module)) is not None:
                raise UnknownModule(f"{where}: {name or 'itself'} ({type(module).__name__}) {special}")
            is_block = type(module) is _PACKED.get(wanted.get(name)) and in_blocks(module)
            if name != activates and not is_block and type(module) is not wanted.get(name):
                raise UnknownModule(f"{where}: {name} is a {type(module).__name__}")
        missing = wanted.keys() - found.keys()
        activation = found.get(activates)
        if missing or gain(layer.input_layernorm) is None:
            raise UnknownModule(f"{where} has no plain {', '.join(sorted(missing)) or 'norm'}")
        if type(activation) not in (nn.SiLU, SiLUActivation, GELUTanh):
            raise UnknownModule(f"{where}: {activates} is a {type(activation).__name__}")
        if mixed and not fits(router := layer.mlp.gate):
            raise UnknownModule(f"{where}: mlp.gate chooses {router.top_k} of {len(router.weight)} experts")
        if getattr(layer.self_attn.config, "clip_qkv", None) is not None:
            raise UnknownModule(f"{where}: self_attn clips queries, keys and values")
        if not layer.self_attn.is_causal:
            raise UnknownModule(f"{where}: self_attn looks ahead")
        weights = {(weight.dtype, weight.device) for weight in layer.parameters()}
        if len(weights) != 1:
            raise UnknownModule(f"{where} has weights of several dtypes or devices")
        refs = {name: ModuleRef.at(layer, name) for name in names}
        attention = layer.self_attn
        return cls(
            module=layer,
            number=number,
            linears=tuple(tuple(refs[name] for name in group) for group in groups),
            experts=KnownExperts.of(layer.mlp) if mixed else None,
            norms=(found[made.before[0]], found[made.before[1]]),
            after=tuple(found[name] for name in made.after),
            head_norms=tuple(found[name] for name in made.heads),
            norms_all=made.norms_all,
            query_heads=attention.q_proj.out_features // attention.head_dim,
            key_heads=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            cap=(made.capped and attention.attn_logit_softcapping) or 0.0,
            gelu=type(activation) is GELUTanh,
        )

    @property
    def like_llama(self) -> bool:
        """Whether it is made as Llama's layers are, but for norms per head."""
        return not (self.after or self.cap or self.gelu or self.experts) and is_known_norm(self.norms[0])

    @property
    def inner(self) -> int:
        """Width of the MLP, or of each expert."""
        return int(self.linears[3][0].module.in_features) if self.experts is None else self.experts.inner

    def head_norm(self) -> tuple[torch.Tensor, float] | None:
        """Weights [Hq + Hkv, 1, head_dim] and epsilon of the norms per head, where the layer has them."""
        if not self.head_norms:
            return None
        (query, epsilon), (key, _) = gains(self.head_norms)
        if self.norms_all:
            return torch.cat([query, key]).view(-1, 1, self.head_dim), epsilon
        return torch.stack([query] * self.query_heads + [key] * self.key_heads).unsqueeze(1), epsilon


def stacked(places: Sequence[ModuleRef]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights [sum of out, in] and biases of linears of one input, one above the other; a lone one's own."""
    linears = [place.module for place in places]
    if len(linears) == 1:
        return linears[0].weight.data, None if linears[0].bias is None else linears[0].bias.data
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    return torch.cat([linear.weight.data for linear in linears]), torch.cat(biases) if biases else None


@dataclass(frozen=True, slots=True, eq=False)
class KnownHead:
    """A plain head, or one in blocks; ``embedding``: the plain one that shares its weight, if one does."""

    head: ModuleRef
    embedding: ModuleRef | None

    @classmethod
    def of(cls, model: nn.Module, head: nn.Module, embedding: nn.Module) -> KnownHead | None:
        """A model's head, or None where only its own module can run it."""
        if in_blocks(head) and why_special(head) is None:
            place = ModuleRef.of(head, model)
            return None if place is None else cls(place, None)
        if type(head) is not nn.Linear or why_special(head) is not None:
            return None
        place, tied = ModuleRef.of(head, model), getattr(embedding, "weight", None) is head.weight
        if not tied:
            return None if place is None else cls(place, None)
        plain = type(embedding) in (nn.Embedding, *_SCALED) and why_special(embedding) is None
        shared = ModuleRef.of(embedding, model) if plain else None
        return None if place is None or shared is None else cls(place, shared)
