"""Bench and training, killed at several moments and with a full disk: begun again, they end as if undisturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
@pytest.mark.parametrize("kind", ["bench", "eagle3"])
def test_a_disturbed_run_ends_like_one_that_was_not(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.killing", kind, str(tmp_path / kind)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ake room" in done.stderr
