"""bitsandbytes checkpoints: 4-bit codes of NF4 or FP4 whose groups have a scale, and LLM.int8's rows, as blocks.

A weight of 4 bits is the float32 that bitsandbytes itself dequantises to: the code's value times its group's scale. A
group is of values side by side in the whole matrix. A scale is a float32, or, quantised twice, a byte's value times the
scale of its own group, plus an offset. A weight of 8 bits is an integer times the row's largest magnitude over 127.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec.decoder.weights.packed import PackedRows, PackedTensors
from specdec.errors import CheckpointError, ConfigError, first_line, shown
from specdec.runners.memory_pages import FilePages
from specdec.settings.files import parse_json

__all__ = ["BitsAndBytesTensors"]

_STATE = ".quant_state."
_KINDS = ("nf4", "fp4")
_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # of groups, that bitsandbytes has
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")  # what lies beside a weight of 4 bits
_BY_127 = c_float(1 / 127).value


@dataclass(frozen=True, slots=True)
class _Scales:
    """Scales of groups of a matrix's values side by side, made as they are read.

    Attributes:
        size: values of a group.
        stored: [groups] float32, or the codes of scales that are quantised, uint8.
        nested: of the latter: what codes stand for [256], the scales of their groups, the size of these groups, and
            what is added to all.
    """

    size: int
    stored: torch.Tensor
    nested: tuple[torch.Tensor, torch.Tensor, int, torch.Tensor] | None

    def of(self, places: torch.Tensor) -> torch.Tensor:
        """Those of the values in these places, in float32."""
        groups = places // self.size
        if self.nested is None:
            return self.stored[groups].float()
        values, scales, size, offset = self.nested
        return values[self.stored[groups].long()] * scales[groups // size] + offset


class _Rows4(PackedRows):
    """Blocks of 4 bits: a float32 scale, and codes two by two."""

    def __init__(self, kind: str, codes: torch.Tensor, values: torch.Tensor, scales: _Scales, pages: FilePages) -> None:
        self._codes, self._values, self._scales, self._pages = codes, values, scales, pages  # codes: [out, in / 2]
        outputs, inputs = len(codes), 2 * codes.shape[1]
        self.format = None
        if inputs % 32 == 0:
            self._block = 64 if inputs % 64 == 0 and scales.size % 64 == 0 else 32
            self.format = f"{kind.upper()}_{self._block}"
            self.shape = outputs, inputs // self._block * (4 + self._block // 2)

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(len(self))
        codes = self._codes[first:last].reshape(-1, self._block // 2)
        blocks = torch.arange(len(codes)) + first * self._codes.shape[1] * 2 // self._block
        heads = self._scales.of(blocks * self._block).view(torch.uint8).view(-1, 4)
        packed: np.ndarray = torch.cat((heads, codes), -1).view(last - first, -1).numpy()
        return packed

    def dense(self, first: int, last: int) -> torch.Tensor:
        codes = self._codes[first:last]
        values = self._values[torch.stack((codes >> 4, codes & 15), -1).flatten(1).int()]
        places = torch.arange(first * values.shape[1], last * values.shape[1])
        return values * self._scales.of(places).view(values.shape)

    def release(self) -> None:
        self._pages.release([self._codes, self._scales.stored])


class _Rows8(PackedRows):
    """Blocks of 8 bits: the row's scale as a float32, and signed codes."""

    def __init__(self, codes: torch.Tensor, largest: torch.Tensor, pages: FilePages) -> None:
        self._codes, self._scales, self._pages = codes, largest.float() * _BY_127, pages
        outputs, inputs = codes.shape
        self.format = None
        if inputs % 32 == 0:
            self._block = 128 if inputs % 128 == 0 else 32
            self.format = f"INT8_{self._block}"
            self.shape = outputs, inputs // self._block * (4 + self._block)

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, rows: slice) -> np.ndarray:
        codes = self._codes[rows].view(torch.uint8).view(len(self._scales[rows]), -1, self._block)
        heads = self._scales[rows].view(torch.uint8).view(-1, 1, 4).expand(-1, codes.shape[1], -1)
        packed: np.ndarray = torch.cat((heads, codes), -1).flatten(1).numpy()
        return packed

    def dense(self, first: int, last: int) -> torch.Tensor:
        return self._codes[first:last].float() * self._scales[first:last, None]

    def release(self) -> None:
        self._pages.release([self._codes])


class BitsAndBytesTensors(PackedTensors):
    """As ``PackedTensors``. Which weights are quantised, and how, their tensors say and not the config.

    Raises:
        ConfigError: rows are to be rounded to bytes, and codes stand for no integers.
    """

    def __init__(self, where: str, files: Mapping[str, Any], int8: bool) -> None:
        self._kinds: dict[str, None] = {}
        self._states = {name.partition(_STATE)[0]: name for name in sorted(files) if _STATE in name}
        if int8 and self._states:
            raise ConfigError(
                f"activations='int8' multiplies integers, and 4-bit codes of {where} stand for numbers that are none; "
                "leave it out"
            )
        super().__init__(where, files)

    def quantised(self) -> Mapping[str, tuple[int, ...]]:
        found = dict[str, tuple[int, ...]]()
        for name, state in self._states.items():
            told = self._json(state)
            if not isinstance(told, dict):
                raise self._unlike(state, f"holds {shown(told)}", "a JSON object")
            shape = told.get("shape")
            if not isinstance(shape, list) or [type(size) for size in shape] != [int, int]:
                raise self._unlike(state, f"says shape {shown(shape)}", "two integers")
            found[name] = tuple(shape)
        for name in self.files:
            if name.endswith(".SCB"):
                weight = f"{name.removesuffix('SCB')}weight"
                if weight in self.files:  # else it is missing
                    found[weight] = tuple(self.files[weight].get_slice(weight).get_shape())
        return found

    def belongs(self, name: str) -> bool:
        place, _, kind = name.rpartition(".")
        if kind == "SCB" or (kind in ("weight", "weight_format") and f"{place}.SCB" in self.files):
            return True
        if _STATE in name:
            return name.partition(_STATE)[0] in self._states
        return name in self._states or (kind in _BESIDE and place in self._states)

    def described(self) -> str:
        return f"{' and '.join(self._kinds)} (bitsandbytes)"

    def packed(self, name: str, shape: Sequence[int]) -> PackedRows | None:
        if (state := self._states.get(name)) is not None:
            return self._rows4(name, state, shape)
        if f"{name.removesuffix('weight')}SCB" in self.files:
            return self._rows8(name, shape)
        return None

    def _rows8(self, name: str, shape: Sequence[int]) -> _Rows8:
        place = name.removesuffix("weight")
        if f"{place}weight_format" in self.files and self.read(f"{place}weight_format", None).any():
            raise CheckpointError(
                f"'{place}weight_format' in {self.where} says that its bytes lie in another order than row by row, "
                "which newer versions of bitsandbytes do not write, nor read; give another checkpoint"
            )
        codes = self.read(name, shape, torch.int8)
        largest = self.read(f"{place}SCB", shape[:1], *_FLOATS)
        self._kinds["int8, a scale for each output"] = None
        return _Rows8(codes, largest, self.pages)

    def _rows4(self, name: str, state: str, shape: Sequence[int]) -> _Rows4:
        told = self._told(state, shape)
        kind, size, count = told["quant_type"], int(told["blocksize"]), math.prod(shape)
        groups = -(-count // size)
        asked = f" by its {state.removeprefix(f'{name}.')}: blocksize {size}"
        own = self.read(name, None)
        codes = own.contiguous().view(-1).view(torch.uint8)
        if len(codes) * 2 != count or shape[1] % 2:
            raise self.misshapen(name, own, [count // 2, 1])
        values = self.read(f"{name}.quant_map", (16,), torch.float32)
        if not torch.equal(values, _values(kind)):
            raise CheckpointError(
                f"'{name}.quant_map' in {self.where} has other values than {kind} has, and blocks have those of "
                "bitsandbytes; give another checkpoint"
            )
        nested = None
        if f"{name}.nested_absmax" not in self.files:
            stored = self.read(f"{name}.absmax", (groups,), *_FLOATS, asked_by=asked)
        else:
            stored = self.read(f"{name}.absmax", (groups,), torch.uint8, asked_by=asked)
            own_size = int(told["nested_blocksize"])
            shape_of = (-(-groups // own_size),)
            scales = self.read(f"{name}.nested_absmax", shape_of, torch.float32, asked_by=asked)
            list_of = self.read(f"{name}.nested_quant_map", (256,), torch.float32)
            nested = list_of, scales, own_size, torch.tensor(told["nested_offset"])
        self._kinds[f"{kind.upper()} in groups of {size}"] = None
        return _Rows4(kind, codes.view(shape[0], -1), values, _Scales(size, stored, nested), self.pages)

    def _json(self, state: str) -> Any:
        """What a weight's JSON says."""
        text = self.read(state, None, torch.uint8)
        try:
            return parse_json(text.contiguous().numpy().tobytes())
        except ValueError as error:
            raise CheckpointError(
                f"cannot read {state!r} in {self.where}: {first_line(error)}; download the checkpoint anew"
            ) from error

    def _told(self, state: str, shape: Sequence[int]) -> Mapping[str, Any]:
        """The same, checked."""
        told = self._json(state)
        kinds = [kind for kind in _KINDS if state.endswith(f".bitsandbytes__{kind}")]
        fitting: dict[str, tuple[Sequence[Any], str]] = {
            "quant_type": (kinds, "nf4 or fp4, as in its name"),
            "blocksize": (_SIZES, f"one of {', '.join(map(str, _SIZES))}"),
            "shape": ([[*shape]], f"the model's {[*shape]}"),
        }
        if f"{state.partition(_STATE)[0]}.nested_absmax" in self.files:
            fitting["nested_blocksize"] = fitting["blocksize"]
            fitting["nested_dtype"] = (["float32"], "float32")
        if not isinstance(told, dict):
            raise self._unlike(state, f"holds {shown(told)}", "a JSON object")
        for name, (values, wanted) in fitting.items():
            if told.get(name) not in values:
                raise self._unlike(state, f"says {name} {shown(told.get(name))}", wanted)
        offset = told.get("nested_offset")
        if "nested_dtype" in fitting and not (type(offset) is float and math.isfinite(offset)):
            raise self._unlike(state, f"says nested_offset {shown(offset)}", "a finite number")
        return told

    def _unlike(self, state: str, what: str, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{state!r} in {self.where} {what}, and it must be {wanted}; install the package bitsandbytes, with which "
            "transformers may load it, or download the checkpoint anew"
        )


def _values(kind: str) -> torch.Tensor:
    """[16] float32: what a code stands for."""
    if kind == "nf4":
        return torch.tensor(_NF4)
    sizes = torch.tensor([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]) / 12.0
    return torch.cat((sizes, -sizes))


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
