"""Which model a trained drafter belongs to: a short text that two loads of one model share, and two models do not."""

from __future__ import annotations

import hashlib

import torch

from specdec.model import TransformersTarget
from specdec.target import Target

__all__ = ["fingerprint"]


def fingerprint(target: Target) -> str:
    """A target's architecture and a hash over a few values of each of its weights, the same in any dtype.

    Values are rounded to bfloat16 first, so a model saved in bfloat16 and loaded in float32 keeps its fingerprint.
    """
    digest = hashlib.sha256()
    named = target.named_weights() if isinstance(target, TransformersTarget) else ()
    for _, weight in named:
        if not weight.is_meta:
            flat = weight.detach().reshape(-1)
            few = flat[:: max(1, len(flat) // 16)][:16].to("cpu", torch.bfloat16)
            digest.update(few.view(torch.int16).numpy().tobytes())
    shape = f"{target.num_layers}x{target.hidden_size}-v{target.vocab_size}"
    return f"{getattr(target, 'name', type(target).__name__)}-{shape}-{digest.hexdigest()[:16]}"
