"""The compiled library: ``layers.c`` built once per machine and compiler, kept on disk, and its functions and types.

Where there is no C compiler that works there is no library, and torch's kernels do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecWarning
from specdec.files import cache_folder

__all__ = ["PAIR", "PANEL", "CBlock", "CLayer", "CProduct", "CShape", "CSlots", "Kind", "compiler", "library"]

PANEL, PAIR = 32, 64
"""Outputs that lie together in a weight, and to a multiple of which it is padded, as in ``layers.c``."""


class Kind(IntEnum):
    """How a weight is stored: float32; bfloat16; bfloat16 by two inputs, for rows that are rounded to it too."""

    FULL, HALF, PAIRS = range(3)


_SOURCE = Path(__file__).with_name("layers.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
_SECONDS = 120  # a compiler that takes longer is not going to come back


class CProduct(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("kind", c_int64),
    )


class CLayer(Structure):
    _fields_ = (
        ("qkv", CProduct),
        ("out", CProduct),
        ("gate_up", CProduct),
        ("down", CProduct),
        ("first_norm", c_void_p),
        ("second_norm", c_void_p),
        ("head_norm", c_void_p),
        ("first_epsilon", c_float),
        ("second_epsilon", c_float),
        ("head_epsilon", c_float),
        ("scale", c_float),
    )


class CShape(Structure):
    _fields_ = tuple((name, c_int64) for name in ("hidden", "query_heads", "key_heads", "head_dim", "inner", "half"))


class CSlots(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("size", c_int64),
        ("stride", c_int64),
        ("window", c_int64),
    )


class CBlock(Structure):
    _fields_ = (
        ("length", c_int64),
        ("first", c_int64),
        ("rows", c_int64),
        ("parents", c_void_p),
        ("depths", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
    )


def compiler() -> str | None:
    """The C compiler that is used here, or None."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


@cache
def library() -> Any:
    """The library, compiled if this machine has not compiled it before; None where it cannot be."""
    found = compiler()
    if found is None:
        return None
    try:
        path = _path(found)
        loaded = _load(path) if path.exists() else None
        if loaded is None:
            _build(found, path)
            loaded = _load(path)
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(f"no native layers, so decoding is slower: {error}", SpecdecWarning, stacklevel=2)
        return None
    if loaded is None:
        warnings.warn(f"no native layers, so decoding is slower: cannot load {path}", SpecdecWarning, stacklevel=2)
        return None
    loaded.specdec_scratch.argtypes = [POINTER(CShape), c_int64, c_int64]
    loaded.specdec_scratch.restype = c_int64
    loaded.specdec_run_layers.argtypes = [
        POINTER(CShape), c_void_p, c_void_p, POINTER(CBlock), c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int,
    ]  # fmt: skip
    loaded.specdec_run_layers.restype = None
    loaded.specdec_product.argtypes = [POINTER(CProduct), c_void_p, c_void_p, c_int64, c_int]
    loaded.specdec_product.restype = None
    return loaded


def _load(path: Path) -> Any:
    """The library in a file; None if the file is broken."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _path(compiler: str) -> Path:
    """Where the library for this source, compiler and machine is kept.

    Raises:
        subprocess.SubprocessError: the compiler cannot even say what it is.
    """
    # Its macros name its version and every instruction set that it takes from this machine; a chip's name may not.
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
    made_of = "|".join((_SOURCE.read_text(encoding="utf-8"), macros, *_FLAGS))
    return cache_folder() / f"layers-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"


def _build(compiler: str, path: Path) -> None:
    """Compile beside the library's place, then put it there.

    Raises:
        OSError: it cannot be written.
        subprocess.SubprocessError: the compiler fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        for threads in (["-fopenmp"], []):  # a compiler without OpenMP makes a library for one thread
            command = [compiler, *_FLAGS, *threads, str(_SOURCE), "-o", str(built), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            if done.returncode == 0:
                built.replace(path)
                return
        done.check_returncode()
