"""Machine: what a measurement holds for."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

import torch

__all__ = ["digest_of_code", "processor"]


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
    """Of specdec's own sources, any of which may make a forward faster or slower."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(path for kind in ("*.py", "*.c") for path in package.rglob(kind)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
