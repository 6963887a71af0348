"""Which decoders Triton's kernels compute, and whether they do so on this device."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch

from specdec.decoder.spec import DecoderSpec
from specdec.errors import SpecdecWarning, first_line
from specdec.execute.knobs import LIKE_LLAMA, unlike
from specdec.step import device_copies

__all__ = ["kernels_for", "layer_kernels", "why_not"]


def why_not(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why the kernels cannot run a decoder; None where they can."""
    llama = "CUDA kernels compute decoders like Llama's"
    if (why := _why_not_there(dtype, device) or unlike(spec, LIKE_LLAMA, llama)) is not None:
        return why
    if len(spec.ropes) > 1:
        return "CUDA kernels read one table of rotary positions, and here they differ by layer"
    return None if kernels_for(spec, dtype, device) is not None else "Triton's kernels do not work here"


def kernels_for(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """The kernels, tried on the decoder's heads; None, with a warning, if they are missing or fail."""
    shapes = {(own.heads, own.kv_heads, own.head_dim, own.qk_norm is not None) for own in spec.attentions}
    return layer_kernels(device, dtype, frozenset(shapes))


def _why_not_there(dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"CUDA kernels run on a CUDA device, and the model is on {device}"
    if dtype is torch.float64:
        return "CUDA kernels compute in single and half precision, and the model in float64"
    return None


@cache
def layer_kernels(
    device: torch.device, dtype: torch.dtype, shapes: frozenset[tuple[int, int, int, bool]]
) -> ModuleType | None:
    """The Triton kernels of layers, tried once on these shapes; None, with a warning, if they are missing or fail.

    ``shapes``: query heads, key heads, their width, and whether heads are normed.
    """
    try:
        kernels = importlib.import_module("specdec.runners.kernels.layer")
        _try(kernels, device, dtype, shapes)
    except Exception as error:  # the compiler's, the driver's and the linker's share no class but this
        warnings.warn(
            f"Triton's kernels for layers are not used, and torch's operations do their work, more slowly: "
            f"{type(error).__name__}: {first_line(error)}",
            SpecdecWarning,
            stacklevel=2,
        )
        return None
    return kernels


def _try(kernels: Any, device: torch.device, dtype: torch.dtype, shapes: frozenset[tuple[int, int, int, bool]]) -> None:
    """Run each kernel once."""
    rows = torch.zeros(1, 64, dtype=dtype, device=device)
    kernels.gate(kernels.add_norm(rows, rows, rows[0], 1e-6)[1])
    counts = torch.zeros(3, dtype=torch.long, device=device)  # no row is stored
    table = torch.ones(1, 3 if dtype == torch.float32 else 2, dtype=torch.long, device=device)
    where = {"counts": counts, "table": table, "places": counts[:1], "tokens": counts[:1]}
    where["closure"] = torch.zeros(1, 1, dtype=torch.bool, device=device)
    tables = torch.full((2,), device_copies.address(rows), device=device)
    kernels.look_up(where, tables, rows.shape[1], rows, rows)
    for query_heads, key_heads, width, normed in shapes:
        heads = torch.zeros(1, (query_heads + 2 * key_heads) * width, dtype=dtype, device=device)
        cos_sin, norms = heads[:, :width], (heads[0], heads[0], 1e-6) if normed else None
        shape = query_heads, key_heads, width
        query = kernels.turn_and_store(heads, cos_sin, cos_sin, counts[:1], norms, where, 0, shape)
        where["paths"] = kernels.paths(where)
        kernels.step_attention(query, where, 0, key_heads, None, 1.0, 1)
    where |= {"draws": counts[:2], "above": counts[:1]}
    kernels.walk(kernels.pick(rows, where), where, None, rows)
    if dtype != torch.float32:
        kernels.product(kernels.product(rows, rows, None, whole=True), rows[:, :1], None)
