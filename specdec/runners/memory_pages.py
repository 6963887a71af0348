"""Memory pages: huge pages for weights, and release of pages of weights that are not needed any more.

Checkpoints are memory-mapped, and a mapping stays whole while one of its tensors lives. So the pages of the originals
would stay in memory beside the repacked weights until the kernel reclaims them. Freed heap memory stays with the
process as well.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.step.torch_switches import HOST

__all__ = ["FilePages", "HugePages", "release_pages", "trim_heap"]

Span = tuple[int, int]  # addresses [first, last)


class HugePages:
    """Memory in huge pages where the system has them (Linux, unless they are switched off); elsewhere plain memory.

    A processor prefetches within a page and stops at its end. Consecutive allocations are adjacent, as a weight may be
    smaller than a huge page. Memory is released when no allocation in it lives.
    """

    _CHUNK = 32 << 20  # bytes, of which only what is written to is there
    _LINE = 64

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: Callable[[], mmap.mmap | None] = lambda: None
        self._taken = 0

    def take(self, count: int) -> torch.Tensor:
        """[count] uint8, of no value yet, at the beginning of a cache line."""
        if not hasattr(mmap, "MADV_HUGEPAGE") or not count:
            return torch.empty(count, dtype=torch.uint8, device=HOST)
        with self._lock:
            chunk = self._chunk()
            if chunk is None or self._taken + count > len(chunk):
                chunk = mmap.mmap(-1, max(count, self._CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with suppress(OSError):  # a kernel without them
                    chunk.madvise(mmap.MADV_HUGEPAGE)
                self._chunk, self._taken = weakref.ref(chunk), 0
            first, self._taken = self._taken, self._taken + -(-count // self._LINE) * self._LINE
        return torch.frombuffer(chunk, dtype=torch.uint8, count=count, offset=first)


class FilePages:
    """The files that this process maps, as they are now: read once, as it takes milliseconds. Linux only."""

    def __init__(self) -> None:
        self._files = _mapped_files() if sys.platform == "linux" else []

    def release(self, weights: Sequence[torch.Tensor]) -> None:
        """Drop weights' pages that are mapped from a file; a later read would load them from the file again.

        Only for weights that no other object uses: changes in memory since they were read are lost.
        """
        if not self._files:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        for weight in weights:
            if weight.device.type != "cpu" or not weight.is_contiguous():
                continue
            first, last = _whole_pages(weight)
            if first < last and any(start <= first and last <= stop for start, stop in self._files):
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def release_pages(rows: np.ndarray) -> None:
    """Drop the pages that rows of a mapped file have alone: read again, they would come from the file. Linux only."""
    mapped: Any = rows
    while isinstance(mapped, np.ndarray):
        mapped = mapped.base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED") or not rows.flags.c_contiguous:
        return
    begin = rows.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (begin + rows.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def trim_heap() -> None:
    """Return the heap's free pages to the system; glibc keeps up to 64 MiB of them for later. Other libraries do so."""
    if sys.platform == "linux":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:
            release(0)


def _whole_pages(weight: torch.Tensor) -> Span:
    """The pages that a weight alone has."""
    size = mmap.PAGESIZE
    return -(-weight.data_ptr() // size) * size, (weight.data_ptr() + weight.nbytes) // size * size


def _mapped_files() -> list[Span]:
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            start, stop = span.split("-")
            found.append((int(start, 16), int(stop, 16)))
    return found
