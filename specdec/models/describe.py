"""The parts of a target's description that do not depend on its executor: section -> name -> value."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from specdec.costs.machine import processor
from specdec.native.library import compiler, library, products
from specdec.settings.files import cache_folder
from specdec.step.pages import PAGE, PagePool

__all__ = ["WHAT_FOLLOWS", "cache_text", "machine", "model", "whole"]

WHAT_FOLLOWS = "texts may part from plain decoding's where two logits are as good as equal"
"""Where rows depend on others."""


def model(target: Any, parameters: int, weights: str | None) -> dict[str, Any]:
    """Its sizes; ``parameters``: how many; ``weights``: how they are held, if not densely."""
    return {
        "class": target.name,
        "layers": target.num_layers,
        "hidden size": target.hidden_size,
        "vocabulary": target.vocab_size,
        "context": target.context_length,
        "parameters": parameters,
        "weights": weights,
        "activations": target.activations,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
    }


def whole(target: Any, parameters: int, weights: str | None) -> dict[str, dict[str, Any]]:
    """Of a live model, which is called as a whole."""
    own = getattr(target.config, "_attn_implementation", "of its class")
    return {
        "model": model(target, parameters, weights),
        "execution": {
            "runner": "modules",
            "because": target.reason,
            "experts": None,
            "attention": f"the model's own ({own})",
            "batch-invariant": f"no: {target.runner.varies}; {WHAT_FOLLOWS}",
            "CUDA graphs": "not used: the model's own forward is called as a whole",
            "threads": None if target.launches else torch.get_num_threads(),
        },
        "machine": machine(target.device),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """What is here."""
    found = library()
    return {
        "processor": processor(device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "compiler": compiler(),
        "native library": None if found is None else found._name,
        "native products": products(),
        "CUDA devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "cache folder": str(cache_folder()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cache_text(pools: Any) -> str:
    """The pages of all texts."""
    own: list[PagePool] = [*pools]
    used, pages, size = (sum(getattr(pool, name) for pool in own) for name in ("used", "pages", "nbytes"))
    return f"in pages of {PAGE} tokens; {used} of {pages} in use, {size / 1e6:.1f} MB"
