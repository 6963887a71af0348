"""Machine: what a measurement holds for, and where measurements are kept between runs."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import platformdirs
import torch

__all__ = ["cache_folder", "processor", "write_json"]


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


def cache_folder() -> Path:
    """Where this user's programs keep what can be made anew, a folder of specdec's own in it."""
    return platformdirs.user_cache_path("specdec")


def write_json(path: Path, value: Any) -> None:
    """Write a file beside its place, then put it there: a reader finds the old one or the new one.

    Raises:
        OSError: no room, or no permission; the old file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
