"""Tree attention: one function behind every decoder layer, with an exact fast split.

``sdpa``
    One call over all visible slots with an additive mask: the reference.
``split``
    The keys that every row sees, without a mask, and the tail (a window's edge and the tree) with a small one; each
    part returns the log-sum-exp of its scores, and the parts are merged by it. With l the log-sum-exp and o the output,
    ``o = (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2)``: exact, whatever the split.
``auto``
    ``split`` for prefill chunks and wide trees over long contexts, and wherever a GPU would otherwise lose its
    flash kernel to the mask; else ``sdpa``, which is one kernel instead of two.

Keys and values are never repeated for grouped-query attention: the kernels take fewer key heads than query heads, or
the group is folded into the query rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from specdec.block import Block
from specdec.errors import ConfigError, TargetError

__all__ = ["BACKENDS", "attend", "check_backend", "layer_attention", "merge", "update_and_attend"]

BACKENDS = ("auto", "sdpa", "split")

# On a CPU one masked call beats two plain ones until the mask is this large (measured: 16 rows, 3,000 keys).
_SPLIT_FROM = 48_000

Part = tuple[torch.Tensor, torch.Tensor]  # output [1, Hq, T, D], log-sum-exp [1, Hq, T]


def check_backend(name: str) -> str:
    """The name, if it is a backend.

    Raises:
        ConfigError: it is none.
    """
    if name not in BACKENDS:
        raise ConfigError(f"attention={name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    return name


def layer_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    block: Block | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention modules call; ``block`` travels to it through the layers' arguments.

    ``key`` and ``value`` are of the block's own rows. Returns [1, T, Hq, D] and no weights.

    Raises:
        TargetError: called outside a specdec forward.
    """
    if block is None:
        raise TargetError("specdec's attention was called outside an Engine; use model.generate without it")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    block.store(key, value, layer)
    return attend(query, block, layer, scale, softcap, sinks=options.get("s_aux")).transpose(1, 2), None


def update_and_attend(
    block: Block, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, scale: float
) -> torch.Tensor:
    """Store a layer's ``keys`` and ``values`` [1, Hkv, T, D or Dv], then ``attend``."""
    block.store(keys, values, layer)
    return attend(query, block, layer, scale)


def attend(
    query: torch.Tensor,
    block: Block,
    layer: int,
    scale: float,
    softcap: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the block's rows, ``query`` [1, Hq, T, D], over the slots that each row sees: [1, Hq, T, Dv].

    ``sinks``: [Hq] a score of each head that takes its share of the softmax, and has no value.
    """
    if sinks is not None:
        keys, values, mask = block.visible(layer, query.dtype)
        output, total = _plain(query, keys, values, scale, mask, softcap)
        share = torch.sigmoid(total - sinks.to(total.dtype)[:, None])  # e^total / (e^total + e^sink)
        return (output * share.unsqueeze(-1)).to(query.dtype)
    if block.backend == "split" or (block.backend == "auto" and _prefers_split(query, block)):
        return _split(query, block, layer, scale, softcap)
    keys, values, mask = block.visible(layer, query.dtype)
    if softcap is not None:
        return _plain(query, keys, values, scale, mask, softcap)[0]
    if query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16):
        return _folded(query, keys, values, scale, mask)
    grouped = keys.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _folded(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """Half precision on a CPU: a group's query heads as rows of one, never fewer than two.

    Torch's kernel multiplies a single bfloat16 row four times slower than two (measured: 16 over 8 heads of 64, 400
    keys, 1034 us against 404); and keys that are converted once serve the whole group.
    """
    heads, rows = keys.shape[1], query.shape[2]
    group = query.shape[1] // heads
    folded = query.view(1, heads, group, rows, -1).transpose(2, 3).reshape(1, heads, rows * group, -1)
    if rows * group == 1:
        folded = folded.expand(-1, -1, 2, -1)
    if mask is not None and group > 1:
        mask = mask.repeat_interleave(group, 0)
    output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    output = output[:, :, : rows * group].reshape(1, heads, rows, group, -1).transpose(2, 3)
    return output.reshape(1, heads * group, rows, -1)


def merge(parts: list[Part]) -> Part:
    """Join attention over disjoint sets of keys by the log-sum-exp of their scores."""
    output, total = parts[0]
    for part, weight in parts[1:]:
        share = torch.sigmoid(weight - total).unsqueeze(-1)  # e^w / (e^t + e^w)
        output = torch.lerp(output.to(share.dtype), part.to(share.dtype), share)
        total = torch.logaddexp(total, weight)
    return output, total


def _prefers_split(query: torch.Tensor, block: Block) -> bool:
    if block.rows == 1:
        return False
    return query.is_cuda or block.rows * (block.length + block.rows) > _SPLIT_FROM


def _split(query: torch.Tensor, block: Block, layer: int, scale: float, softcap: float | None) -> torch.Tensor:
    layout = block.layout(block.cache.group_of[layer], query.dtype)
    keys, values = block.cache.keys[layer], block.cache.values[layer]
    parts: list[Part] = []
    kernel = _kernel(query) if softcap is None else _plain
    for first, last in layout.prefix:
        parts.append(kernel(query, keys[:, :, first:last], values[:, :, first:last], scale, None, softcap))
    prior = merge(parts) if parts else None
    tree = _tree_kernel(query) if softcap is None else None
    if tree is not None:
        return tree(query, keys, values, layout.tail, layout.mask, scale, prior)
    if isinstance(layout.tail, tuple):
        first, last = layout.tail
        keys, values = keys[:, :, first:last], values[:, :, first:last]
    else:
        keys, values = keys.index_select(2, layout.tail), values.index_select(2, layout.tail)
    mask = layout.mask
    if query.device.type == "cpu" and softcap is None:
        own = _cpu_flash(query, keys, values, scale, mask, causal=layout.causal)
    else:
        if layout.causal:
            mask = torch.full((block.rows, block.rows), -torch.inf, dtype=query.dtype, device=query.device).triu_(1)
        own = _plain(query, keys, values, scale, mask, softcap)
    return (own if prior is None else merge([prior, own]))[0].to(query.dtype)


def _tree_kernel(query: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """The Triton kernel for trees, on a GPU and where Triton is installed; torch's wheels for CUDA bring it."""
    return _load_tree_kernel() if query.is_cuda and query.dtype != torch.float64 else None


@cache
def _load_tree_kernel() -> Callable[..., torch.Tensor] | None:
    try:
        from specdec.kernels.tree import tree_attention
    except ImportError:
        return None
    return tree_attention


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor | None, float | None], Part]


def _kernel(query: torch.Tensor) -> Kernel:
    """The fastest kernel for keys that every row sees."""
    if query.device.type == "cpu":
        return _cpu_flash
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _gpu_flash
    return _plain


def _cpu_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    _: float | None = None,
    *,
    causal: bool = False,
) -> Part:
    """Torch's flash kernel for CPUs, which also returns the log-sum-exp."""
    output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, weight


def _gpu_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    _: float | None = None,
) -> Part:
    """flash-attn where it is installed, else torch's own variable-length flash kernel; both take strided keys."""
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))  # [1, rows, heads, D]
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        rows, size = q.shape[1], k.shape[1]
        own, past = (torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (rows, size))
        aux = AuxRequest(lse=True)
        result = varlen_attn(q[0], k[0], v[0], own, past, rows, size, return_aux=aux, scale=scale, enable_gqa=True)
        output, weight = result[0], result[1]
        # The log-sum-exp comes as [heads, rows] or [rows, heads], depending on the release.
        weight = weight if weight.shape == (q.shape[2], rows) else weight.T
        return output.transpose(0, 1)[None], weight[None]
    output, weight, _weights = flash_attn_func(q, k, v, softmax_scale=scale, return_attn_probs=True)
    return output.transpose(1, 2), weight


def _plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    softcap: float | None = None,
) -> Part:
    """Matrix products and a softmax, for soft-capped scores and small masked parts; scores are [Hkv, G * T, S]."""
    heads, rows = keys.shape[1], query.shape[2]
    group = query.shape[1] // heads
    folded = query.reshape(heads, group * rows, -1)
    scores = torch.matmul(folded, keys[0].transpose(1, 2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(heads, group, rows, -1)
    if mask is not None:
        scores = scores + mask
    if scores.dtype != torch.float64:
        scores = scores.float()
    weight = torch.logsumexp(scores, -1, keepdim=True)
    shares = torch.exp(scores - weight).to(values.dtype).view(heads, group * rows, -1)
    output = torch.matmul(shares, values[0])
    return output.view(1, heads * group, rows, -1), weight.view(1, heads * group, rows)
