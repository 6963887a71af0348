"""Triton's kernels compile for GPUs: by its own compiler and assembler, which need none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "compile_kernels.py"


def compile_kernels(*arguments: str) -> list[str]:
    """The lines of the script, which runs without the interpreter that these tests are under."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, [line for line in lines if "FAILED" in line] or done.stderr
    return lines[:-1]


@pytest.mark.slow
def test_every_property_of_a_kernel_compiles() -> None:
    """For one architecture, without a number in memory that belongs in a register, and with keys and weights read 16
    bytes at once; all variants and architectures take a quarter of an hour, which the script is for.
    """
    lines = compile_kernels("--arch", "90", "--meet", "1")
    assert len(lines) >= 55
    assert all("ok" in line for line in lines)
