"""Names of tensors that only some families have: tables of parts, as of :mod:`specdec.decoder.names`."""

from __future__ import annotations

from dataclasses import replace

from specdec.decoder.names import DECODER, Names

__all__ = [
    "AFTER",
    "AROUND",
    "EXAONE_MOE",
    "GLM",
    "GLM4",
    "GPT_OSS",
    "GRANITE_MOE",
    "HUNYUAN",
    "LFM2",
    "MIXTRAL",
    "NEIGHBOURS",
    "PHI3",
    "QWEN2_MOE",
    "STARCODER2",
]

AROUND = Names(
    {
        **DECODER,
        "after.attention": ("layers.{layer}.post_attention_layernorm",),
        "before.mlp": ("layers.{layer}.pre_feedforward_layernorm",),
        "after.mlp": ("layers.{layer}.post_feedforward_layernorm",),
    }
)
LFM2 = Names(
    {
        **DECODER,
        "norm": ("embedding_norm",),
        "before.attention": ("layers.{layer}.operator_norm",),
        "before.mlp": ("layers.{layer}.ffn_norm",),
        "attention.o": ("layers.{layer}.self_attn.out_proj",),
        **{f"attention.{one}_norm": (f"layers.{{layer}}.self_attn.{one}_layernorm",) for one in "qk"},
        **{
            f"mlp.{part}": (f"layers.{{layer}}.feed_forward.{name}",)
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
)
MIXTRAL = Names(
    {
        **DECODER,
        "experts.router": ("layers.{layer}.mlp.gate", "layers.{layer}.block_sparse_moe.gate"),
        **{
            f"experts.{part}": (
                f"layers.{{layer}}.block_sparse_moe.experts.{{expert}}.{name}",
                f"layers.{{layer}}.mlp.experts.{{expert}}.{name}",
            )
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
)
NEIGHBOURS = Names(DECODER, neighbours=True)
"""The usual ones, of models that turn neighbours."""
AFTER = Names(
    {
        **DECODER,
        "after.attention": ("layers.{layer}.post_attention_layernorm",),
        "after.mlp": ("layers.{layer}.post_feedforward_layernorm",),
    }
)
"""Of models whose norms are behind attention and MLP alone."""
EXAONE_MOE = Names({**DECODER, "experts.router": (*DECODER["experts.router"], "layers.{layer}.mlp")})
"""The router's bias is beside it in checkpoints."""
_QKV, _GATE_UP = ("attention.q", "attention.k", "attention.v"), ("mlp.gate", "mlp.up")
PHI3 = Names(
    {
        **DECODER,
        "attention.qkv": ("layers.{layer}.self_attn.qkv_proj",),
        "mlp.gate_up": ("layers.{layer}.mlp.gate_up_proj",),
    },
    stacked={"attention.qkv": _QKV, "mlp.gate_up": _GATE_UP},
)
GLM = Names(
    {**DECODER, "mlp.gate_up": ("layers.{layer}.mlp.gate_up_proj",)},
    stacked={"mlp.gate_up": _GATE_UP},
    neighbours=True,
)
GLM4 = replace(
    GLM,
    decoder={
        **GLM.decoder,
        "after.attention": ("layers.{layer}.post_self_attn_layernorm",),
        "after.mlp": ("layers.{layer}.post_mlp_layernorm",),
    },
)
_SHARED = ("shared.gate", "shared.up")
GRANITE_MOE = Names(
    {
        **DECODER,
        "mlp.gate_up": ("layers.{layer}.shared_mlp.input_linear",),
        "mlp.down": ("layers.{layer}.shared_mlp.output_linear",),
        "shared.gate_up": ("layers.{layer}.shared_mlp.input_linear",),
        "shared.down": ("layers.{layer}.shared_mlp.output_linear",),
        "experts.router": ("layers.{layer}.block_sparse_moe.router", "layers.{layer}.block_sparse_moe.router.layer"),
    },
    experts={
        f"experts.{part}": (
            f"layers.{{layer}}.block_sparse_moe.experts.{part}_proj",
            f"layers.{{layer}}.block_sparse_moe.{linear}_linear.weight",
        )
        for part, linear in (("gate_up", "input"), ("down", "output"))
    },
    stacked={"mlp.gate_up": _GATE_UP, "shared.gate_up": _SHARED},
)
GPT_OSS = Names({**DECODER, "experts.router": ("layers.{layer}.mlp.router",)}, interleaved=True)
_PRODUCTS = ("gate", "up", "down")
HUNYUAN = Names(
    {
        **DECODER,
        "attention.q_norm": ("layers.{layer}.self_attn.query_layernorm",),
        "attention.k_norm": ("layers.{layer}.self_attn.key_layernorm",),
        "experts.router": ("layers.{layer}.mlp.gate.wg",),
        **{f"shared.{one}": (f"layers.{{layer}}.mlp.shared_mlp.{one}_proj",) for one in _PRODUCTS},
    }
)
QWEN2_MOE = Names(
    {
        **DECODER,
        "shared.router": ("layers.{layer}.mlp.shared_expert_gate",),
        **{f"shared.{one}": (f"layers.{{layer}}.mlp.shared_expert.{one}_proj",) for one in _PRODUCTS},
    }
)
STARCODER2 = Names({**DECODER, "mlp.up": ("layers.{layer}.mlp.c_fc",), "mlp.down": ("layers.{layer}.mlp.c_proj",)})
