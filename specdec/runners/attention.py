"""Tree attention: the attention function of every decoder layer.

On a CPU in float32 and bfloat16 it is the native library's (:mod:`specdec.runners.native_attention`). Elsewhere it is
torch's, whole with a mask or in two exact and fast parts.

Whole, it is one call over all visible slots with an additive mask. In parts, the keys that every row sees have no mask,
and the tail (a window's edge and the tree) has a small one. Each part returns the log-sum-exp of its scores, by which
the parts are merged. With l the log-sum-exp and o the output, ``o = (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2)``, which is
exact for any split.

On a CPU prefill chunks and wide trees over long contexts are computed in parts, by torch's flash kernel; all else is
whole, which is one kernel instead of two. On a CUDA device all is in parts: in half precision the prefix goes by a
flash kernel, torch's own (``auto``) or that of flash-attn 2.8 and up (``flash``), and a chain or a chunk of the prompt
is one causal call of it. Where that kernel does not compute (full precision, soft caps, odd widths), it is plain
products.

Torch is never left to choose among its CUDA kernels: on some devices it prefers cuDNN's, which plans for every length.
Keys and values are never repeated for grouped-query attention: the kernels take fewer key heads than query heads, or
the group is folded into the query rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from specdec.errors import ConfigError
from specdec.runners.attention_kernels import (
    FLASH,
    PartialAttention,
    cpu_flash,
    flash_attn,
    merge,
    plain_attention,
    torch_flash,
)
from specdec.runners.native_attention import attended, c_rows, computes
from specdec.runners.rows import Rows, TextRows
from specdec.runners.visibility import Layout
from specdec.step import device_copies
from specdec.step.cache import LayerSpec

__all__ = [
    "attend",
    "attend_all",
    "attend_ends",
    "check_runs",
    "describe_backend",
]

# On a CPU one masked call beats two plain ones until the mask is this large (measured: 16 rows, 3,000 keys).
SPLIT_FROM = 48_000


def check_runs(name: str, specs: Sequence[LayerSpec]) -> None:
    """Raises ConfigError where a backend that was named computes nothing of a model whose layers cache this."""
    if name != "flash":
        return
    flash_attn()
    if not any(_flash_takes(spec.device, spec.dtype, spec.key_dim, spec.value_dim) for spec in specs):
        spec = specs[0]
        raise ConfigError(
            f"attention={name!r} is for float16 and bfloat16, heads of up to 256 in eights and CUDA devices of "
            f"capability 8.0 and up; this model has {str(spec.dtype)[6:]}, {spec.key_dim} and {spec.device}: leave it "
            "at auto"
        )


def describe_backend(name: str, specs: Sequence[LayerSpec], softcap: float | None) -> str:
    """Which kernels a backend means for a model whose layers cache this, in words."""
    spec = specs[0]
    if spec.device.type != "cuda":
        native = name == "auto" and all(computes(own.device, own.dtype, own.key_dim, own.value_dim) for own in specs)
        return f"{name} (the native library's)" if native else name
    flash = softcap is None and _flash_takes(spec.device, spec.dtype, spec.key_dim, spec.value_dim)
    prefix = {"auto": "torch's flash kernel", "flash": "flash-attn"}[name] if flash else "plain products"
    return f"{name} (text so far: {prefix}, tree: plain products)"


def attend(
    query: torch.Tensor,
    rows: Rows | TextRows,
    layer: int,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the rows, ``query`` [1, Hq, T, D], over the slots that each row sees: [1, Hq, T, Dv].

    Rows of one text alone, ``TextRows``, are for torch's kernels.

    ``sinks``: [Hq] one more score of each head, of no key, whose share adds nothing.
    """
    if isinstance(rows, TextRows):
        return _attend(query, rows, layer, scale, softcap, sinks)
    if _by_library(query, rows, layer):
        return attended(query, rows.c_rows, layer, scale, softcap, sinks)
    if rows.alone:
        return _attend(query, rows.parts[0], layer, scale, softcap, sinks)
    every = [_attend(query[:, :, one.begins : one.ends], one, layer, scale, softcap, sinks) for one in rows.parts]
    return torch.cat(every, 2)


def _by_library(query: torch.Tensor, rows: Rows, layer: int) -> bool:
    """Whether the native library attends, which torch's kernels were not asked for in place of."""
    if rows.backend != "auto" or device_copies.is_apart(query.device):
        return False
    cache = rows.parts[0].cache
    keys, values = cache.keys[layer], cache.values[layer]
    return query.dtype is keys.dtype and computes(keys.device, keys.dtype, keys.shape[-1], values.shape[-1])


def _attend(
    query: torch.Tensor, rows: TextRows, layer: int, scale: float, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    large = rows.rows > 1 and rows.rows * (rows.length + rows.rows) > SPLIT_FROM
    if large or query.is_cuda or rows.backend == "flash":
        return _beside(sinks, _split(query, rows, layer, scale, softcap)).to(query.dtype)
    keys, values, mask = rows.visible(layer, query.dtype)
    if softcap is not None or sinks is not None:
        return _beside(sinks, plain_attention(query, keys, values, scale, mask, softcap)).to(query.dtype)
    if query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16):
        return _folded(query, keys, values, scale, mask)
    grouped = keys.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _beside(sinks: torch.Tensor | None, found: PartialAttention) -> torch.Tensor:
    """Attention over all keys, less the share of the head's sink, if it has one."""
    output, weight = found
    if sinks is None:
        return output
    return output * torch.sigmoid(weight - sinks.to(weight.dtype)[:, None]).unsqueeze(-1)  # e^w / (e^w + e^sink)


def attend_all(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of ``query`` [1, Hq, T, D] over all of ``keys`` and ``values`` [1, Hkv, S, D]: [1, Hq, T, D]."""
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=keys.shape[1] != query.shape[1])
    taken = _flash_takes(query.device, query.dtype, query.shape[-1], values.shape[-1])
    return (torch_flash if taken else plain_attention)(query, keys, values, query.shape[-1] ** -0.5)[0]


def attend_ends(query: torch.Tensor, rows: Rows, layer: int, scale: float, counts: Sequence[int]) -> torch.Tensor:
    """As :func:`attend`, of each sequence's last rows alone, as many as ``counts`` says: [1, Hq, N, Dv]."""
    if _by_library(query, rows, layer):
        asked = query.index_select(2, torch.tensor(rows.step.last_rows(counts)))
        return attended(asked, c_rows(rows.step, counts), layer, scale)
    found = []
    for part, count in zip(rows.parts, counts, strict=True):
        whole = count == 1 and part.parents is None and part.cache.group_of[layer].window is None
        if whole:  # the last row of a text sees all of it
            keys, values = (
                store[layer].narrow(2, 0, part.length + part.last) for store in (part.cache.keys, part.cache.values)
            )
            found.append(attend_all(query[:, :, part.ends - 1 : part.ends], keys, values))
        else:
            found.append(attend(query[:, :, part.begins : part.ends], part, layer, scale)[:, :, -count:])
    return found[0] if len(found) == 1 else torch.cat(found, 2)


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


def _flash_takes(device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Whether flash kernels compute with such heads."""
    fits = width == value_width and width <= 256 and width % 8 == 0
    return fits and dtype in (torch.float16, torch.bfloat16) and _has_flash(device)


@cache
def _has_flash(device: torch.device) -> bool:
    built = torch.backends.cuda.is_flash_attention_available  # some builds of torch have none
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) and built()


def _split(query: torch.Tensor, rows: TextRows, layer: int, scale: float, softcap: float | None) -> PartialAttention:
    layout = rows.layout(rows.cache.group_of[layer], query.dtype)
    keys, values = rows.cache.keys[layer], rows.cache.values[layer]
    flash = None
    if softcap is None and _flash_takes(query.device, query.dtype, query.shape[-1], values.shape[-1]):
        flash = FLASH[rows.backend]
    if flash is not None and (whole := _one_range(layout)) is not None:
        first, last = whole
        return flash(query, keys[:, :, first:last], values[:, :, first:last], scale, causal=rows.rows > 1)
    parts: list[PartialAttention] = []
    by_cpu_flash = query.device.type == "cpu" and softcap is None
    kernel = flash or (cpu_flash if by_cpu_flash else plain_attention)
    for first, last in layout.prefix:
        parts.append(kernel(query, keys[:, :, first:last], values[:, :, first:last], scale, softcap=softcap))
    prior = merge(parts) if parts else None
    if isinstance(layout.tail, tuple):
        first, last = layout.tail
        keys, values = keys[:, :, first:last], values[:, :, first:last]
    else:
        keys, values = keys.index_select(2, layout.tail), values.index_select(2, layout.tail)
    mask = layout.mask
    if by_cpu_flash:
        own = cpu_flash(query, keys, values, scale, mask, causal=layout.causal)
    else:
        if layout.causal:
            mask = torch.full((rows.rows, rows.rows), -torch.inf, dtype=query.dtype, device=query.device).triu_(1)
        own = plain_attention(query, keys, values, scale, mask, softcap)
    return own if prior is None else merge([prior, own])


def _one_range(layout: Layout) -> tuple[int, int] | None:
    """The slots of a chain whose last row sees all of them, where they are contiguous: one causal call does it."""
    tail, prefix = layout.tail, layout.prefix
    if layout.mask is not None or not isinstance(tail, tuple) or len(prefix) > 1:
        return None
    if prefix and prefix[0][1] != tail[0]:
        return None
    return (prefix[0][0] if prefix else tail[0]), tail[1]
