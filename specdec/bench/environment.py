"""Environment: commit, versions and hardware, for a run's manifest; clocks and memory meters for its answers."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specdec.costs.machine import processor
from specdec.target import Target
from specdec.version import __version__

__all__ = ["MemoryMeter", "caption", "caption_of", "describe_environment", "describe_model"]

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Everything that can change a figure: code, versions, machine, threads."""
    commit, dirty = _commit()
    return {
        "commit": commit,
        "uncommitted_changes": dirty,
        "python": platform.python_version(),
        "versions": {"specdec": __version__, **{name: version(name) for name in _PACKAGES}},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": processor(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": processor(device) if device.type == "cuda" else str(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }


def caption(environment: Mapping[str, Any]) -> str:
    """Commit, versions and hardware on one line, for figures."""
    changed = " + uncommitted changes" if environment["uncommitted_changes"] else ""
    versions = environment["versions"]
    device = environment["device"] if environment["cuda"] else environment["cpu"]
    return (
        f"specdec {environment['commit'] or 'no commit'}{changed}, torch {versions['torch']}, "
        f"transformers {versions['transformers']} | {device}, threads: {environment['threads']}"
    )


def caption_of(manifest: Mapping[str, Any]) -> str:
    """The same of a run, behind its settings."""
    plan = manifest["plan"]
    return (
        f"{manifest['model']['name']}, {manifest['model']['dtype']}, T={plan['temperature']:g}, "
        f"{manifest['questions']['asked']} questions, {plan['max_new_tokens']} new tokens, {plan['repeats']} repeats | "
        f"{caption(manifest['environment'])}"
    )


def describe_model(name: str, target: Target) -> dict[str, Any]:
    """A description of the model; ``fingerprint`` depends on weights and dtype only, not on their place."""
    digest = hashlib.sha256()
    parameters = 0
    for key, weight in target.named_weights():
        parameters += weight.numel()
        digest.update(f"{key}{list(weight.shape)}{weight.dtype}".encode())
        flat = weight.reshape(-1)
        stride = max(1, flat.numel() // 64)
        digest.update(flat[::stride][:64].double().cpu().numpy().tobytes())
    return {
        "name": name,
        "class": target.name,
        "parameters": parameters,
        "layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "context_length": target.context_length,
        "dtype": str(target.dtype).removeprefix("torch."),
        **({} if target.activations is None else {"activations": target.activations}),
        "fingerprint": digest.hexdigest()[:16],
    }


class MemoryMeter:
    """Peak bytes of a GPU's allocator since ``reset``.

    A CPU has no such figure: all systems share one process and therefore its resident memory.
    ``scripts/peak_memory.py`` measures each system in a process of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else None


def _commit() -> tuple[str | None, bool]:
    """Commit of the checkout with this package, and whether it has changes; None outside of a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return run.stdout.strip()

    if git("ls-files", "--error-unmatch", "../__init__.py") is None:  # installed inside another repository
        return None, False
    commit = git("rev-parse", "--short=10", "HEAD")
    return commit, bool(git("status", "--porcelain", "--untracked-files=no"))
