"""Ranks as processes on gloo: the texts of one process, and an end for all where one is gone.

All of it is ``slow``: a process takes seconds to import what it needs. Threads show the same in
``test_parallel_rows.py``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine
from tests.models import target_of
from tests.process_worker import NEW, PROMPT, SAMPLING

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def worker(processes: int, tmp_path: Path, *case: str, ends: int = 0) -> dict[int, Any]:
    """What each process found, by its rank; ``ends`` of them end without a word. Nobody ends the others, as torchrun
    would.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(ROOT / "tests" / "process_worker.py"), *case]
    shared = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    started = subprocess.Popen(
        command,
        env={**shared, "SPECDEC_TEST_OUT": str(tmp_path)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed = started.communicate(timeout=500)[0]  # until the last of them has closed it
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    found = {int(place.stem): json.loads(place.read_text()) for place in tmp_path.glob("*.json")}
    assert len(found) == processes - ends, printed[-4000:]
    return found


def test_two_processes_decode_one_text(tmp_path: Path) -> None:
    plain = Engine(target_of("llama")).generate(PROMPT, NEW, SAMPLING).token_ids
    for found in worker(2, tmp_path, "quick").values():
        assert found["text"] == plain
        assert found["sent"] == [4 * (2 + 128 + 128)] * found["steps"]


@pytest.mark.parametrize(("case", "processes"), [("random_families", 3), ("tiny_rows", 2)])
def test_rows(case: str, processes: int, tmp_path: Path) -> None:
    for found in worker(processes, tmp_path, case).values():
        assert found["together"] == found["alone"]


def test_tensor(tmp_path: Path) -> None:
    """Also of drafts that carry a q: the same text as with the whole weights in one process."""
    for found in worker(2, tmp_path, "tiny_tensor").values():
        assert found["together"] == found["alone"]
        assert found["runner"]["runner"] == "modules"
        assert "DTensor" in found["runner"]["because"]


@pytest.mark.skipif("SPECDEC_TEST_MODEL" not in os.environ, reason="SPECDEC_TEST_MODEL names no folder of a model")
def test_rows_of_a_real_model(tmp_path: Path) -> None:
    for found in worker(2, tmp_path, "folder_rows", os.environ["SPECDEC_TEST_MODEL"]).values():
        assert found["together"] == found["alone"]


def test_a_killed_process_ends_the_others(tmp_path: Path) -> None:
    found = worker(3, tmp_path, "killed", ends=1)
    for rank in (0, 2):
        assert "has lost another one" in found[rank]["error"]


def test_a_process_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    found = worker(2, tmp_path, "stopped")
    assert "has lost another one, which ended, or was 3 seconds late" in found[0]["error"]


def test_the_command_line_prints_once() -> None:
    def run(*options: str) -> str:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "specdec",
        ]
        command = [*launcher, "generate", "import re", "--parallel", "rows", "--drafter", "lookahead", *options]
        done: Any = subprocess.run(
            command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=300, check=False
        )
        return str(done.stdout + done.stderr)

    assert run("--max-new-tokens", "8").count("lookahead: 8 tokens") == 1
