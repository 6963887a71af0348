"""The native library for a processor that has less. Its bits by all builds are in ``unit/native/test_bits.py``."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from specdec.native import library as native
from specdec.settings.files import cache_folder

__all__ = ["level"]


@pytest.fixture(scope="module")
def level() -> Any:
    """The library for AVX2 where this processor has AVX-512, and for neither where it has not.

    To compile it takes half a minute, so workers share it.
    """
    own, processor = native.compiler(), "haswell" if "avx512f" in native.features() else "x86-64"
    if "sse2" not in native.features():
        pytest.skip("this processor has no such instructions")
    flags = ["-O1", f"-march={processor}", "-fno-math-errno", "-shared", "-fPIC", "-fopenmp", "-w"]
    source = Path(native.__file__).with_name("layers.c")
    made = cache_folder() / "levels" / f"{processor}.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{made}.lock"):
        if not made.exists():
            assert own is not None
            subprocess.run([own, *flags, str(source), "-o", str(made), "-lm"], capture_output=True, check=True)
        return native._load(made)
