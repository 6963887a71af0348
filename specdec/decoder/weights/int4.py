"""GPTQ and AWQ checkpoints: 4-bit codes whose groups of inputs have a scale and a zero, as native layers' blocks.

Such checkpoints have a matrix as words of eight codes, input by input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specdec.decoder.weights.int4_settings import Int4Settings
from specdec.decoder.weights.packed import PackedRows, PackedTensors
from specdec.errors import CheckpointError
from specdec.runners.memory_pages import FilePages

__all__ = ["Int4Tensors"]

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_BLOCKS = (128, 64, 32)  # values of a block
_PLACES = {"gptq": (0, 1, 2, 3, 4, 5, 6, 7), "awq": (0, 4, 1, 5, 2, 6, 3, 7)}
"""Method -> which four bits of a word, counted from the lowest, have the first output, the second, ..."""


def _outputs_of(words: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """[n, 8 words] uint8: four bits each, of int32 words [n, words], in the order of outputs."""
    own = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((own & 15, own >> 4), -1).flatten(-2)[..., list(places)].flatten(1)


class _Int4Rows(PackedRows):
    """A matrix's blocks, packed as they are read: a float16 scale, its zero as a float16, codes two by two."""

    def __init__(
        self,
        settings: Int4Settings,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        inputs: int,
        pages: FilePages,
    ) -> None:
        self._codes, zeros, scales = tensors
        self._method, self._pages, self._outputs = settings.method, pages, scales.shape[1]
        group = inputs if settings.group_size == -1 else settings.group_size
        self.values = next(values for values in _BLOCKS if group % values == 0 and inputs % values == 0)
        self.format = f"INT4_{self.values}"
        stored = _outputs_of(zeros, _PLACES[self._method])
        self._heads = torch.stack((scales, (stored + settings.zero_offset).to(torch.float16)), -1)  # [groups, out, 2]
        self._groups = torch.arange(0, inputs, self.values) // group  # of each block
        self.shape = self._outputs, inputs // self.values * (4 + self.values // 2)

    def __len__(self) -> int:
        return self._outputs

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(self._outputs)
        heads = self._heads[self._groups, first:last].transpose(0, 1).contiguous().view(torch.uint8)  # [n, blocks, 4]
        codes = self._pairs(first, last).reshape(last - first, len(self._groups), -1)
        packed: np.ndarray = torch.cat((heads, codes), -1).flatten(1).numpy()
        return packed

    def _pairs(self, first: int, last: int) -> torch.Tensor:
        """[n, in / 2] codes of some outputs, an even input's in the low bits."""
        if self._method == "gptq":
            words = self._codes[:, first:last].contiguous()
            return words.view(torch.uint8).view(*words.shape, 4).transpose(0, 1).flatten(1)
        begin = first // 8
        codes = _outputs_of(self._codes[:, begin : -(-last // 8)], _PLACES["awq"])
        codes = codes[:, first - 8 * begin : last - 8 * begin].t()
        return codes[:, ::2] | codes[:, 1::2] << 4

    def dense(self, first: int, last: int) -> torch.Tensor:
        """[n, in] float32."""
        heads = self._heads[self._groups, first:last].transpose(0, 1).float()
        pairs = self._pairs(first, last)
        codes = torch.stack((pairs & 15, pairs >> 4), -1).view(last - first, len(self._groups), self.values)
        return (heads[..., :1] * (codes.float() - heads[..., 1:])).flatten(1)

    def release(self) -> None:
        self._pages.release([self._codes])


class Int4Tensors(PackedTensors):
    """As ``PackedTensors``; ``settings``: how the checkpoint's config says that it is packed."""

    def __init__(self, settings: Int4Settings, where: str, files: Mapping[str, Any]) -> None:
        self._settings = settings
        super().__init__(where, files)

    def quantised(self) -> Mapping[str, tuple[int, ...]]:
        found = dict[str, tuple[int, ...]]()
        for name, file in self.files.items():
            if name.endswith(".qweight"):
                rows, columns = file.get_slice(name).get_shape()
                shape = (columns, 8 * rows) if self._settings.method == "gptq" else (8 * columns, rows)
                found[f"{name.removesuffix('.qweight')}.weight"] = shape
        return found

    def belongs(self, name: str) -> bool:
        place, _, kind = name.rpartition(".")
        return kind in _PARTS and f"{place}.qweight" in self.files

    def described(self) -> str:
        size = self._settings.group_size
        return f"int4 ({self._settings.method.upper()}, {'one group an output' if size == -1 else f'groups of {size}'})"

    def packed(self, name: str, shape: Sequence[int]) -> _Int4Rows | None:
        """A weight's blocks, or None where it is not quantised."""
        place = name.removesuffix(".weight")
        if name in self.files or f"{place}.qweight" not in self.files:
            return None
        outputs, inputs = shape
        size = inputs if self._settings.group_size == -1 else self._settings.group_size
        if outputs % 8 or inputs % 32:
            raise CheckpointError(
                f"{place!r} in {self.where} is {outputs} x {inputs}, and outputs are packed by 8, inputs by 32; give "
                "another checkpoint"
            )
        groups = math.ceil(inputs / size)
        packed = (inputs // 8, outputs) if self._settings.method == "gptq" else (inputs, outputs // 8)
        asked = f" by its quantization_config: {self._settings.method}, 4 bits, group_size {self._settings.group_size}"
        codes = self.read(f"{place}.qweight", packed, torch.int32, asked_by=asked)
        zeros = self.read(f"{place}.qzeros", (groups, outputs // 8), torch.int32, asked_by=asked)
        floats = torch.float16, torch.bfloat16, torch.float32
        scales = self.read(f"{place}.scales", (groups, outputs), *floats, asked_by=asked)
        self.check_finite(f"{place}.scales", scales)
        halves = scales.to(torch.float16)
        if not torch.equal(halves.float(), scales.float()):
            raise CheckpointError(
                f"'{place}.scales' in {self.where} are {str(scales.dtype)[6:]}, and blocks' scales are float16, which "
                "does not have all of these values; give a checkpoint whose scales are float16"
            )
        self._check_order(f"{place}.g_idx", inputs, size)
        return _Int4Rows(self._settings, (codes, zeros, halves), inputs, self.pages)

    def _check_order(self, name: str, inputs: int, size: int) -> None:
        """Raises CheckpointError where groups are not of inputs side by side."""
        if name not in self.files:
            if self._settings.ordered:
                raise self.unfit(f"1 missing, such as {name}, which desc_act=true asks for")
            return
        order = self.read(name, (inputs,))
        if not torch.equal(order.long(), torch.arange(inputs) // size):
            raise CheckpointError(
                f"{name!r} in {self.where} has inputs of a group that do not lie side by side (desc_act), and those "
                "of a block do; give a checkpoint that was made with desc_act=false, or a GGUF file"
            )
