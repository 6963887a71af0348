"""Native layers by tiles (AMX) and pairs (AVX512_BF16) on a machine with neither: their instructions in C.

A processor that has them runs the same tests by its own instructions.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from scripts.native_bits import DRIVER, TARGETS, Build
from specdec.native.library import library

EMULATED = Build("gcc", "tiles, emulated")
TESTS = ("tests/unit/native/test_native.py", "tests/property/test_attention.py")
CHECK = """
import sys
import pytest
from specdec.native.library import library
assert library().specdec_tiles()
sys.exit(pytest.main(["-p", "no:xdist", "-p", "no:cacheprovider", "-x", "-q", "-o", "addopts=", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_native_layers_by_emulated_tiles() -> None:
    if (why := EMULATED.missing()) is not None:
        pytest.skip(why)
    if library().specdec_tiles():
        pytest.skip("this processor has tiles")
    flags = (*TARGETS[EMULATED.target][0], "-include", str(DRIVER.with_name("emulated.h")))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own = kept | {"SPECDEC_CFLAGS": shlex.join(flags), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", CHECK, *TESTS], capture_output=True, text=True, env=own)
    assert not done.returncode, done.stdout[-4000:] + done.stderr[-2000:]
