"""Machine: what a measurement holds for."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

__all__ = ["processor"]


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
