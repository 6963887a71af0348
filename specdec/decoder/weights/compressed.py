"""compressed-tensors checkpoints: integers of 4 or 8 bits whose groups of inputs have a scale, as native blocks.

A weight is its integer, less its group's zero where the group has one, times the group's scale. The package
compressed-tensors computes that in the scales' dtype; here it is not rounded, and in that dtype the two are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specdec.decoder.weights.compressed_settings import CompressedSettings, Scheme
from specdec.decoder.weights.packed import PackedRows, PackedTensors
from specdec.errors import CheckpointError
from specdec.runners.memory_pages import FilePages

__all__ = ["CompressedTensors"]

_PARTS = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
_ROUNDING = tuple(
    f"{what}_{kind}" for what in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point", "global_scale")
)
"""What is of activations, and of keys and values in a cache."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_BLOCKS = {"INT4": (128, 64, 32), "INT8": (128, 32)}  # values of a block


def _codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """[n, count] int8 that lie in words [n, words] int32, the first in the lowest bits."""
    own = words.contiguous().view(torch.uint8)
    if bits == 4:
        own = torch.stack((own & 15, own >> 4), -1).flatten(1)
    return (own[:, :count].to(torch.int16) - (1 << bits - 1)).to(torch.int8)


class _Rows(PackedRows):
    """Blocks, packed as they are read: of 4 bits with a float16 scale and zero, or of 8 bits with a float32 scale.

    Args:
        stored: [out, words] int32, or [out, in] int8.
        scales: [out, groups].
        zeros: [out, groups] int8, or None.
        group: inputs of one.
    """

    def __init__(
        self,
        stored: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        *,
        inputs: int,
        group: int,
        bits: int,
        pages: FilePages,
    ) -> None:
        self._stored, self._scales, self._zeros, self._pages = stored, scales, zeros, pages
        self._inputs, self._bits, self._group = inputs, bits, group
        self.format, self._block = None, group
        packed = bits == 4 and stored.dtype is torch.int32
        self._in_4_bits = packed and torch.equal(scales.half().float(), scales.float())
        self._narrow = zeros is None or packed  # else an integer less its zero may need a ninth bit
        kind = "INT4" if self._in_4_bits else "INT8"
        fits = [values for values in _BLOCKS[kind] if inputs % values == 0 and group % values == 0]
        if fits and self._narrow:
            self._block = fits[0]
            self.format = f"{kind}_{self._block}"
            self.shape = len(stored), inputs // self._block * (4 + self._block * (4 if self._in_4_bits else 8) // 8)
        self._groups = torch.arange(0, inputs, self._block) // group  # of each block

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(len(self))
        heads = self._heads(first, last).view(torch.uint8)  # [n, blocks, 4]
        codes = self._stored[first:last].contiguous() if self._in_4_bits else self._integers(first, last)
        bodies = codes.view(torch.uint8).view(last - first, len(self._groups), -1)
        packed: np.ndarray = torch.cat((heads, bodies), -1).flatten(1).numpy()
        return packed

    def _heads(self, first: int, last: int) -> torch.Tensor:
        """[n, blocks, 1] float32, or [n, blocks, 2] float16: scales, and the codes that stand for zero."""
        scales = self._scales[first:last, self._groups]
        if not self._in_4_bits:
            return scales.float()[..., None].contiguous()
        zeros = torch.full_like(scales, 8, dtype=torch.float16)
        if self._zeros is not None:
            zeros += self._zeros[first:last, self._groups]
        return torch.stack((scales.half(), zeros), -1)

    def _integers(self, first: int, last: int) -> torch.Tensor:
        """[n, in] integers, less their zeros: int8, or int16 where these may not be enough."""
        found = self._stored[first:last]
        if found.dtype is torch.int32:
            found = _codes(found, self._bits, self._inputs)
        if self._zeros is None:
            return found.contiguous()
        wide = found.to(torch.int8 if self._narrow else torch.int16)
        return wide - self._zeros[first:last].repeat_interleave(self._group, 1)[:, : self._inputs]

    def dense(self, first: int, last: int) -> torch.Tensor:
        scales = self._scales[first:last].float().repeat_interleave(self._group, 1)[:, : self._inputs]
        return self._integers(first, last).float() * scales

    def release(self) -> None:
        self._pages.release([self._stored, self._scales])


class CompressedTensors(PackedTensors):
    """As ``PackedTensors``; ``settings``: what the checkpoint's config says."""

    def __init__(self, settings: CompressedSettings, where: str, files: Mapping[str, Any]) -> None:
        self._settings, self._kinds = settings, dict[str, None]()
        super().__init__(where, files)

    def quantised(self) -> Mapping[str, tuple[int, ...]]:
        found = dict[str, tuple[int, ...]]()
        for name in self.files:
            place, _, kind = name.rpartition(".")
            weight = f"{place}.weight"
            if kind == "weight_packed":
                shape = self.read(f"{place}.weight_shape", (2,), torch.int64, torch.int32)
                found[weight] = tuple(shape.tolist())
            elif kind == "weight_scale" and weight in self.files:
                found[weight] = tuple(self.files[weight].get_slice(weight).get_shape())
        return found

    def belongs(self, name: str) -> bool:
        place, _, kind = name.rpartition(".")
        if kind in _ROUNDING and self._settings.rounded:
            return True
        held = f"{place}.weight_packed" in self.files or f"{place}.weight_scale" in self.files
        return held and kind in (*_PARTS, "weight")

    def described(self) -> str:
        return f"{' and '.join(self._kinds)} (compressed-tensors{self.left_out()})"

    def left_out(self) -> str:
        asked = " and of ".join(self._settings.rounded)
        return asked and f"; the rounding of {asked} that its config asks for is not done"

    def packed(self, name: str, shape: Sequence[int]) -> _Rows | None:
        """A weight's blocks, or None where it is not quantised."""
        place = name.removesuffix(".weight")
        scale, words = f"{place}.weight_scale", f"{place}.weight_packed"
        if scale not in self.files and words not in self.files:
            return None
        if words in self.files and name in self.files:
            raise CheckpointError(
                f"{place!r} in {self.where} has both weight and weight_packed; download the checkpoint anew"
            )
        own = self._settings.scheme(place)
        outputs, inputs = shape
        group = own.group if own.group > 0 else inputs
        if inputs % group:
            raise CheckpointError(
                f"{place!r} in {self.where} has {inputs} inputs, which are no whole groups of {group}, its "
                "group_size; download the checkpoint anew"
            )
        asked = f" by its quantization_config: {own.bits} bits, {_described(own)}"
        if own.packed:
            stored = self.read(words, (outputs, -(-inputs * own.bits // 32)), torch.int32, asked_by=asked)
        else:
            stored = self.read(name, shape, torch.int8)
        groups = inputs // group
        scales = self._by_group(scale, own, (outputs, groups), asked, *_FLOATS)
        self.check_finite(scale, scales)
        zeros = self._zeros(f"{place}.weight_zero_point", own, (outputs, groups), asked)
        self._check_order(f"{place}.weight_g_idx", inputs, group)
        self._kinds[f"int{own.bits}, {_described(own)}"] = None
        return _Rows(stored, scales, zeros, inputs=inputs, group=group, bits=own.bits, pages=self.pages)

    def _by_group(
        self, name: str, own: Scheme, shape: tuple[int, int], asked: str, *dtypes: torch.dtype
    ) -> torch.Tensor:
        """[out, groups] a tensor of a number for each group, an output's or the matrix's alone being of fewer axes."""
        found = self.read(name, None, *dtypes)
        fewer = {0: [(), (1,), (1, 1)], -1: [(shape[0],), shape]}
        if tuple(found.shape) not in fewer.get(own.group, [shape]):
            raise self.misshapen(name, found, shape, asked)
        return found.reshape(-1, shape[1] if own.group > 0 else 1).expand(shape)

    def _zeros(self, name: str, own: Scheme, shape: tuple[int, int], asked: str) -> torch.Tensor | None:
        """[out, groups] int8, or None where all are 0."""
        if name not in self.files:
            if not own.symmetric:
                raise self.unfit(f"1 missing, such as {name}, which symmetric=false asks for")
            return None
        if self.files[name].get_slice(name).get_dtype() == "I32":  # packed, output by output
            words = self.read(name, (-(-shape[0] * own.bits // 32), shape[1]), torch.int32, asked_by=asked)
            found = _codes(words.t(), own.bits, shape[0]).t()
        else:
            found = self._by_group(name, own, shape, asked, torch.int8)
        least = -(1 << own.bits - 1)
        if found.min() < least or found.max() > -least - 1:
            raise CheckpointError(
                f"{name!r} in {self.where} has {int(found.int().abs().max())}, and codes of {own.bits} bits are from "
                f"{least} to {-least - 1}; download the checkpoint anew"
            )
        return found.contiguous() if found.any() else None

    def _check_order(self, name: str, inputs: int, size: int) -> None:
        """Raises CheckpointError where groups are not of inputs side by side."""
        if name not in self.files:
            return
        order = self.read(name, (inputs,))
        if not torch.equal(order.long(), torch.arange(inputs) // size) and not bool((order == -1).all()):
            raise CheckpointError(
                f"{name!r} in {self.where} has inputs of a group that do not lie side by side (actorder 'group'), and "
                "those of a block do; give a checkpoint that was made with actorder 'weight', or a GGUF file"
            )


def _described(own: Scheme) -> str:
    if own.group > 0:
        return f"groups of {own.group}"
    return "a scale for each output" if own.group else "a scale for each matrix"
