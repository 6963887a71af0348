"""Limits: what this machine's cores read and multiply at best, against which a forward's time is set."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from time import perf_counter

from specdec.errors import ConfigError
from specdec.native.library import library
from specdec.native.types import Kind

__all__ = ["Limits", "measure"]

_MIB = 1 << 20
_LEAST, _MOST = 64 * _MIB, 1024 * _MIB  # bytes that are read
_CACHES = 8  # times the last cache
_PASSES = 3  # over the memory, by each loop
_TIMES, _SECONDS = 20_000, 0.02  # rounds of multiplications at once; for how long, at least
_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What some threads do at best.

    Attributes:
        reading: bytes a second, from memory.
        multiplying: multiplications and additions a second.
    """

    reading: float
    multiplying: float


def measure(kind: Kind, *, tiles: bool, threads: int) -> Limits:
    """Measure both, in a second or two, with this number of threads.

    Reading is the fastest of four loops, by one stream and by two, with and without prefetch instructions, over huge
    pages where the system lends them. Multiplying is that of products with weights of this kind, ``tiles`` by tiles.

    Raises:
        ConfigError: there is no native library.
    """
    if library() is None:
        raise ConfigError("limits are measured by the native library, which needs a C compiler (cc, gcc or clang)")
    size = min(max(_CACHES * _last_cache(), _LEAST), _MOST)
    return Limits(reading=_reading(size, threads), multiplying=_multiplying(kind, tiles, threads))


def _last_cache() -> int:
    """Bytes of the last cache; 0 where the system does not tell."""
    found = 0
    for name in ("SC_LEVEL2_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE"):
        with suppress(ValueError, OSError):
            found = max(found, os.sysconf(name))
    return found


def _reading(size: int, threads: int) -> float:
    with mmap.mmap(-1, size + 2 * _MIB) as pages:
        with suppress(AttributeError, OSError):  # not every system has them
            pages.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        ctypes.memset(start, 1, len(pages))
        start += -start % (2 * _MIB)
        seconds = []
        for streams, asks, _ in product((1, 2), (False, True), range(_PASSES)):
            begun = perf_counter()
            library().specdec_read(start, size, streams, asks, threads)
            seconds.append(perf_counter() - begun)
    return size / min(seconds)


def _multiplying(kind: Kind, tiles: bool, threads: int) -> float:
    best, times = 0.0, _TIMES
    for _ in range(_TRIES):
        while True:
            begun = perf_counter()
            operations = library().specdec_multiply(kind, tiles, times, threads)
            seconds = perf_counter() - begun
            if seconds >= _SECONDS:
                break
            times *= 2
        best = max(best, operations / seconds)
    return best
