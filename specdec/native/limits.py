"""Limits: what this machine's cores read and multiply at best, against which a forward's time is set."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from time import perf_counter

from specdec.errors import ConfigError
from specdec.native.library import library
from specdec.native.types import Kind

__all__ = ["Arithmetic", "Limits", "measure"]

_MIB = 1 << 20
_LEAST, _MOST = 64 * _MIB, 1024 * _MIB  # bytes that are read
_CACHES = 8  # times the last cache
_PASSES = 3  # over the memory, by each loop
_TIMES, _SECONDS = 20_000, 0.02  # rounds of multiplications at once; for how long, at least
_TRIES = 5
_TILED = 32  # heads of a multiple of this attend by tiles


class Arithmetic(StrEnum):
    """What instructions multiply; products and attention of a model may take several."""

    FLOATS = "float32"
    PAIRS = "pairs of bfloat16"
    TILES = "tiles of bfloat16"
    WORDS = "16-bit integers"
    BYTES = "bytes"

    @classmethod
    def of(cls, kind: Kind, *, tiles: bool) -> Arithmetic:
        """That of a product with weights of a kind; ``tiles``: by tiles, where float32 rows are of three parts."""
        if tiles:
            return cls.TILES
        pairs, integers = (Kind.PAIRS, Kind.CODED_PAIRS), {Kind.QUANTISED: cls.WORDS, Kind.INT8_QUANTISED: cls.BYTES}
        return cls.PAIRS if kind in pairs else integers.get(kind, cls.FLOATS)

    @classmethod
    def of_attention(cls, head_dim: int, *, half: bool) -> Arithmetic:
        """That of native attention; ``half``: of a model in bfloat16."""
        if not half or not library().specdec_pairs():
            return cls.FLOATS
        return cls.TILES if library().specdec_tiles() and head_dim % _TILED == 0 else cls.PAIRS

    @property
    def unit(self) -> str:
        """Of thousands of millions of its operations a second."""
        return "Gop/s" if self in (Arithmetic.WORDS, Arithmetic.BYTES) else "GFLOP/s"


_KINDS = {
    Arithmetic.FLOATS: Kind.FULL,
    Arithmetic.PAIRS: Kind.PAIRS,
    Arithmetic.TILES: Kind.PAIRS,
    Arithmetic.WORDS: Kind.QUANTISED,
    Arithmetic.BYTES: Kind.INT8_QUANTISED,
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What some threads do at best.

    Attributes:
        reading: bytes a second, from memory.
        multiplying: multiplications and additions a second, by what instructions multiply.
    """

    reading: float
    multiplying: Mapping[Arithmetic, float]


def measure(arithmetics: Iterable[Arithmetic], threads: int) -> Limits:
    """Measure reading and each kind of multiplying, in a second or two, with this number of threads.

    Reading is the fastest of four loops, by one stream and by two, with and without prefetch instructions, over huge
    pages where the system lends them. Multiplying is what instructions do with values that lie in registers.

    Raises:
        ConfigError: there is no native library.
    """
    if library() is None:
        raise ConfigError("limits are measured by the native library, which needs a C compiler (cc, gcc or clang)")
    size = min(max(_CACHES * _last_cache(), _LEAST), _MOST)
    return Limits(reading=_reading(size, threads), multiplying={one: _multiplying(one, threads) for one in arithmetics})


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


def _multiplying(arithmetic: Arithmetic, threads: int) -> float:
    kind, tiles = _KINDS[arithmetic], arithmetic is Arithmetic.TILES
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
