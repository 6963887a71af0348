"""MXFP4: 32 values of four bits that share a power of two, as blocks of integers that hold the very same numbers.

A value is +-{0, 1, 2, 3, 4, 6, 8, 12} times half of that power (OCP Microscaling Formats 1.0, E2M1 and E8M0). These are
among the codes of Q5_0, whose scale is a float16; where one of a matrix's powers is none, INT8_32's are float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from specdec.decoder.weights.packed import PackedRows, PackedTensors
from specdec.decoder.weights.safetensors import FLOATS

__all__ = ["Mxfp4Rows", "Mxfp4Tensors"]

_SIZES = (0, 1, 2, 3, 4, 6, 8, 12)
_VALUES = np.array([*_SIZES, *(-size for size in _SIZES)], np.int8)  # of codes, in halves
_HALF = 128  # of the exponent whose power is 1, as values are in halves
_LEAST, _MOST = _HALF - 24, _HALF + 15  # whose powers are float16
_STACKED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""What is of all experts -> the parts whose outputs alternate in it."""
_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


class Mxfp4Rows(PackedRows):
    """A matrix, of which nothing but exponents is read before its rows are.

    Args:
        exponents: [out, blocks] uint8.
        codes: [out, blocks, 16] uint8, two in a byte.
        paired: a byte's two values stand side by side; else they are 16 apart.
        release: drops the pages of both.

    Attributes:
        called: what its blocks are in the file.
    """

    called = "MXFP4"

    def __init__(
        self, exponents: np.ndarray, codes: np.ndarray, release: Callable[[], None], *, paired: bool = False
    ) -> None:
        self._exponents, self._codes, self._paired, self._release = exponents, codes, paired, release
        odd = (exponents < _LEAST) | (exponents > _MOST)
        self._narrow = not odd.any() or not (codes[odd] & 0x77).any()  # zeros have any power
        outputs, blocks = exponents.shape
        self.format = "Q5_0" if self._narrow else "INT8_32"
        self.shape = outputs, blocks * (22 if self._narrow else 36)

    def __len__(self) -> int:
        return len(self._exponents)

    def __getitem__(self, rows: slice) -> np.ndarray:
        values, powers = self._values(rows), self._powers(rows)
        parts: list[np.ndarray]
        if not self._narrow:
            parts = [powers.view(np.uint8), values.view(np.uint8)]
        else:
            codes = (values + 16).view(np.uint8)
            fifth = np.packbits(codes >> 4, axis=-1, bitorder="little")
            low = codes & 15
            parts = [powers.astype(np.float16).view(np.uint8), fifth, low[..., :16] | low[..., 16:] << 4]
        return np.concatenate(parts, -1).reshape(len(values), -1)

    def _values(self, rows: slice) -> np.ndarray:
        """[n, blocks, 32] int8: in halves."""
        codes = self._codes[rows]
        both = codes & 15, codes >> 4
        whole = np.stack(both, -1).reshape(*codes.shape[:-1], 32) if self._paired else np.concatenate(both, -1)
        found: np.ndarray = _VALUES[whole]
        return found

    def _powers(self, rows: slice) -> np.ndarray:
        """[n, blocks, 1] float32: what values are multiplied by."""
        found: np.ndarray = np.ldexp(np.float32(1), self._exponents[rows].astype(np.int32) - _HALF)[..., None]
        if self._narrow:
            found = np.where(found > np.float32(65504), np.float32(0), found)  # of a block of zeros
        return found

    def dense(self, first: int, last: int) -> torch.Tensor:
        rows = slice(first, last)
        return torch.from_numpy((self._values(rows) * self._powers(rows)).reshape(last - first, -1))

    def release(self) -> None:
        self._release()


class Mxfp4Tensors(PackedTensors):
    """As ``PackedTensors``: gpt-oss's, whose experts are in one tensor, as if each had its own."""

    def quantised(self) -> Mapping[str, tuple[int, ...]]:
        found = dict[str, tuple[int, ...]]()
        for name, file in self.files.items():
            place, _, own = name.rpartition(".")
            whole, _, kind = own.rpartition("_")
            if whole not in _STACKED or kind not in ("blocks", "bias"):
                continue
            parts, shape = _STACKED[whole], tuple(file.get_slice(name).get_shape())
            if len(shape) != {"blocks": 4, "bias": 2}[kind] or 0 in shape or shape[1] % len(parts):
                wanted = "[experts, outputs, blocks, 16]" if kind == "blocks" else "[experts, outputs]"
                raise self.unfit(f"1 misshapen, such as {name}, {[*shape]} in place of {wanted}")
            inputs = (32 * shape[2],) if kind == "blocks" else ()
            own_kind = "weight" if kind == "blocks" else "bias"
            for number in range(shape[0]):
                for part in parts:
                    found[f"{place}.{number}.{part}_proj.{own_kind}"] = shape[1] // len(parts), *inputs
        return found

    def belongs(self, name: str) -> bool:
        whole, _, kind = name.rpartition(".")[2].rpartition("_")
        return whole in _STACKED and kind in ("blocks", "scales", "bias")

    def described(self) -> str:
        return "MXFP4"

    def packed(self, name: str, shape: Sequence[int]) -> Mxfp4Rows | None:
        place, number, rows = self._place(name)
        if not name.endswith(".weight"):
            return None
        codes = self.read(f"{place}_blocks", None, torch.uint8)
        exponents = self.read(f"{place}_scales", codes.shape[:3], torch.uint8)
        if codes.shape[3] != 16:
            raise self.misshapen(f"{place}_blocks", codes, [*codes.shape[:3], 16])
        own = codes[number], exponents[number]
        return Mxfp4Rows(own[1][rows].numpy(), own[0][rows].numpy(), partial(self.pages.release, own), paired=True)

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if name.endswith(".weight"):
            return super().dense(name, shape, dtype)
        place, number, rows = self._place(name)
        return self.read(f"{place}_bias", None, *FLOATS.values())[number, rows].to(dtype)

    def _place(self, name: str) -> tuple[str, int, slice]:
        """The name of all experts' tensor, the number of the expert, and its outputs in it."""
        found = _EXPERT.fullmatch(name)
        assert found is not None
        whole, parts = next((whole, parts) for whole, parts in _STACKED.items() if found[3] in parts)
        return f"{found[1]}.{whole}", int(found[2]), slice(parts.index(found[3]), None, len(parts))
