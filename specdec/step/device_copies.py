"""Copies between host and device: one into the device before a forward, one out after it, as each costs a launch more.

A copy in is asynchronous, from pinned memory. A copy out waits for the device, so a step makes one. Tokens that a
device drafts need not be known on the host before they are verified (``on_device`` of a draft).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "Views",
    "address",
    "copy_in",
    "copy_out",
    "fill",
    "free_bytes",
    "is_apart",
    "pack",
    "packed",
    "pick",
    "reading",
    "seconds_of",
    "views",
    "wait",
]

_ALIGN = 16  # bytes; every view may be read as any dtype
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.bool_): torch.bool, np.dtype(np.uint8): torch.uint8}


@lru_cache
def is_apart(device: torch.device | None) -> bool:
    """Whether a device has memory of its own, so that every copy to it or from it costs a launch, or a wait."""
    return device is not None and device.type != "cpu"


def wait(device: torch.device) -> None:
    """Until the device has done what this thread gave it, so that a clock that is read next tells the truth.

    Others' streams are not waited for: one of them may be in the midst of a capture, which that would break.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a CUDA device can still give to tensors; None elsewhere."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def address(tensor: torch.Tensor) -> int:
    """Where it begins in its device's memory, for kernels that read such a number."""
    return tensor.data_ptr()


def seconds_of(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """What some work takes, begun when the device has nothing else to do; a GPU's own clock is read on a GPU."""
    wait(device)
    if device.type != "cuda":
        began = clock()
        work()
        return clock() - began
    event: Any = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    first.record(stream)
    work()
    last.record(stream)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3  # elapsed_time returns milliseconds


def copy_in(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> Views:
    """Arrays (int64, bool or bytes) on a device, by one copy: views of one buffer, in shape and dtype."""
    places, size = pack(arrays)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    fill(host.numpy(), arrays)
    return Views(host.to(device, non_blocking=True), arrays, places)


def pack(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[str, int], int]:
    """The offset of each array in the buffer, and the buffer's size in bytes."""
    places, size = {}, 0
    for name, array in arrays.items():
        places[name] = size
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    return places, size


def fill(buffer: npt.NDArray[np.uint8], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write the arrays to their offsets."""
    padded = (array.tobytes() + bytes(-array.nbytes % _ALIGN) for array in arrays.values())
    buffer[:] = np.frombuffer(b"".join(padded), dtype=np.uint8)


def packed(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """The arrays in one buffer."""
    buffer = np.empty(pack(arrays)[1], dtype=np.uint8)
    fill(buffer, arrays)
    return buffer


class Views(dict[str, torch.Tensor]):
    """The parts of a filled buffer [bytes], as tensors of the arrays' shapes and dtypes; each is cut when it is read.

    A cut takes three calls of torch, and of a batch's arrays few are read by themselves.

    Args:
        arrays: by name; each one's shape and dtype are read.
        places: where each begins in the buffer.
    """

    def __init__(self, buffer: torch.Tensor, arrays: Mapping[str, npt.NDArray[Any]], places: Mapping[str, int]) -> None:
        super().__init__()
        self.buffer, self.places, self._arrays = buffer, places, arrays

    def __contains__(self, name: object) -> bool:
        return name in self._arrays or super().__contains__(name)

    def __missing__(self, name: str) -> torch.Tensor:
        array, first = self._arrays[name], self.places[name]
        cut = self.buffer[first : first + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        self[name] = cut
        return cut


def views(buffer: torch.Tensor, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """All parts of a filled buffer [bytes], as tensors of the arrays' shapes and dtypes."""
    found = Views(buffer, arrays, pack(arrays)[0])
    return {name: found[name] for name in arrays}


def pick(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The given rows of a tensor. On a device they are sliced one by one, as an index would cost a copy."""
    return torch.stack([tensor[row] for row in rows]) if is_apart(tensor.device) else tensor[list(rows)]


def copy_out(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Copy tensors of one device to the host in one copy, each flattened to a list; waits for the device.

    Integers are copied as int64, floats as the bits of float64.
    """
    flat = [
        (tensor.double().view(torch.int64) if tensor.is_floating_point() else tensor.long()).reshape(-1)
        for tensor in tensors
    ]
    numbers: list[int] = torch.cat(flat).tolist()
    found, start = list[list[Any]](), 0
    for tensor, part in zip(tensors, flat, strict=True):
        own = numbers[start : start + len(part)]
        found.append(np.array(own, dtype=np.int64).view(np.float64).tolist() if tensor.is_floating_point() else own)
        start += len(part)
    return found


def reading(tensor: torch.Tensor) -> Callable[[], list[float]]:
    """Begin to copy a tensor [N] to the host; calling the result waits for the copy, not for later kernels."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event: Any = torch.cuda.Event
    there = event()
    there.record(torch.cuda.current_stream(tensor.device))

    def numbers() -> list[float]:
        there.synchronize()
        found: list[float] = host.tolist()
        return found

    return numbers
