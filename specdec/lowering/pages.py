"""Pages: give back the memory of weights that were read from a file and are not needed as they are any more.

Checkpoints are mapped, and a mapping stays as a whole while one tensor of it lives. So repacked weights would stand
beside their originals' pages, until the kernel wants those back.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import torch

__all__ = ["forget"]


def forget(weight: torch.Tensor) -> None:
    """Drop a weight's pages where they are a file's: read again, they would come from the file. Linux only.

    For weights that nobody else holds: what was changed in memory since they were read is lost.
    """
    if sys.platform != "linux" or weight.device.type != "cpu" or not weight.is_contiguous():
        return
    first = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and _is_file(first, last):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def _is_file(first: int, last: int) -> bool:
    """Whether addresses [first, last) are one mapping of a file."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        start, stop = (int(address, 16) for address in span.split("-"))
        if start <= first and last <= stop:
            return inode != "0"
    return False
