"""Static shapes: the layers of a step as compiled graphs, one per row bucket, cache size, entry, exit and taps.

A compiler wants shapes that never change. So rows are padded to a power of two, caches come in powers of two, and
attention runs over a whole cache under a mask, padding rows writing to a spare slot. What depends on the text (where
rows go, what they see, their angles) arrives as tensors. Each graph is compiled at its first use and never again.

Attention is one opaque operation: inside a graph the compiler takes it apart, and copies the cache.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from specdec.block import Block
from specdec.errors import ConfigError
from specdec.lowering import LoweredLayer

__all__ = ["StaticLayers", "check_compiler"]

_MOST_ROWS = 128  # larger blocks are prefill, which has work enough to hide its launches

Backend = bool | str | Callable[..., Any]


def check_compiler(backend: Backend, device: torch.device) -> None:
    """See that torch.compile's default backend has what it needs here.

    Raises:
        ConfigError: no C++ compiler for a CPU, or no Triton for a GPU.
    """
    if backend is not True:
        return
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        missing = None if has_triton() else "Triton, which is not installed or knows no such GPU"
    else:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            missing = None if get_cpp_compiler() else "a C++ compiler"
        except (InvalidCxxCompiler, RuntimeError, OSError):
            missing = "a C++ compiler, and none of those that torch looks for (g++, clang++) works here"
    if missing:
        raise ConfigError(f"compile=True needs {missing}; install it, or leave compile off")


@torch.library.custom_op("specdec::attend", mutates_args=("cached_keys", "cached_values"))
def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Store keys and values [1, Hkv, T, D] at ``slots`` [T], attend under ``mask`` [T, S]: [1, Hq, T, D]."""
    cached_keys.index_copy_(2, slots, keys)
    cached_values.index_copy_(2, slots, values)
    size = mask.shape[1]
    keys, values = cached_keys.narrow(2, 0, size), cached_values.narrow(2, 0, size)
    grouped = keys.shape[1] != query.shape[1]
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return mixed.contiguous()


@_attend.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


class StaticLayers:
    """Lowered layers behind compiled graphs.

    Args:
        layers: all of a target's.
        backend: of torch.compile; True is its own (inductor), with CUDA graphs on a GPU.
    """

    def __init__(self, layers: Sequence[LoweredLayer], backend: Backend) -> None:
        self._layers = layers
        self._backend = backend
        self._graphs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def fits(self, block: Block) -> bool:
        """Whether a block is of a size that is worth a graph."""
        return block.rows <= _MOST_ROWS and block.cache.static

    def run(
        self,
        hidden: torch.Tensor,
        block: Block,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        first: int,
        last: int,
        taps: Collection[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """[T, D] through layers [first, last), and the taps below ``last``."""
        cache = block.cache
        rows = 1 << (block.rows - 1).bit_length()
        padding = (0, 0, 0, rows - block.rows)
        wanted = tuple(sorted(tap for tap in taps if first <= tap < last))
        key = (rows, first, last, wanted, *(group.size for group in cache.groups))
        if key not in self._graphs:
            self._graphs[key] = self._compile(key, first, last, wanted, [cache.groups.index(g) for g in cache.group_of])
        numbers = range(block.length + block.first, block.length + block.first + block.rows)
        slots, masks = [], []
        for group in cache.groups:
            spare = [group.size] * (rows - block.rows)
            slots.append(torch.tensor([*(n % group.size for n in numbers), *spare], device=group.keys.device))
            (start, end), mask = block.mask(group, hidden.dtype)
            if mask is None:
                mask = torch.zeros(block.rows, end - start, dtype=hidden.dtype, device=group.keys.device)
            mask = F.pad(mask, (start, group.size - end), value=-torch.inf)
            masks.append(F.pad(mask, padding))
        hidden, *found = self._graphs[key](
            F.pad(hidden, padding),
            F.pad(cos, padding),
            F.pad(signed_sin, padding),
            slots,
            masks,
            [group.keys for group in cache.groups],
            [group.values for group in cache.groups],
            cache.place_of,
        )
        return hidden[: block.rows], {tap: kept[: block.rows] for tap, kept in zip(wanted, found, strict=True)}

    def _compile(
        self, key: tuple[Any, ...], first: int, last: int, taps: tuple[int, ...], groups: list[int]
    ) -> Callable[..., Any]:
        layers = self._layers

        def step(
            hidden: torch.Tensor,
            cos: torch.Tensor,
            signed_sin: torch.Tensor,
            slots: list[torch.Tensor],
            masks: list[torch.Tensor],
            cached_keys: list[torch.Tensor],
            cached_values: list[torch.Tensor],
            places: list[int],
        ) -> list[torch.Tensor]:
            def mix(
                query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, scale: float
            ) -> torch.Tensor:
                group, place = groups[layer], places[layer]
                cached = cached_keys[group][place], cached_values[group][place]
                mixed: torch.Tensor = _attend(query, keys, values, *cached, slots[group], masks[group], scale)
                return mixed

            found = []
            for number in range(first, last):
                if number in taps:
                    found.append(hidden)
                hidden = layers[number](hidden, mix, cos, signed_sin)
            return [hidden, *found]

        # Dynamo counts a function's graphs by its code, and gives up on the ninth: each of ours gets code of its own.
        code = step.__code__.replace(co_name=f"step_of_{key[0]}_rows")
        own = types.FunctionType(code, step.__globals__, code.co_name, step.__defaults__, step.__closure__)
        options: dict[str, Any] = {}
        if self._backend is not True:
            options["backend"] = self._backend
        elif layers[0].first_norm.weight.is_cuda:
            options["mode"] = "reduce-overhead"
        compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=False, **options)
        return compiled
