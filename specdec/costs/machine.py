"""Machine: the processor and code that a measurement depends on, and a check of threads after a fork."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

from specdec.errors import ForkError

__all__ = ["Threads", "digest_of_code", "processor"]


class Threads:
    """The threads among which torch and the native library divide a product. OpenMP starts them once per process.

    A fork does not copy them, and the new process would wait for them forever.
    """

    _started_by: ClassVar[int | None] = None  # by process id

    @classmethod
    def check(cls) -> None:
        """Record that this process is about to use several threads.

        Raises:
            ForkError: a process from which this one was forked did so before.
        """
        threads = torch.get_num_threads()
        if threads < 2:
            return
        process = os.getpid()
        if cls._started_by is None:
            cls._started_by = process
        if cls._started_by != process:
            raise ForkError(
                f"process {process} was forked from process {cls._started_by}, which computes with several threads; a "
                f"fork does not copy them, so that a generation with {threads} threads would never end here. Call "
                "torch.set_num_threads(1) after the fork, or start processes by multiprocessing's 'spawn' and load the "
                "model in them"
            )


def processor(device: torch.device) -> str:
    """Name of a device's chip, such as ``AMD EPYC 9005``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def digest_of_code() -> str:
    """Digest of specdec's sources, any of which may change the time of a forward."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(path for kind in ("*.py", "*.c") for path in package.rglob(kind)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
