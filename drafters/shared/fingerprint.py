"""Fingerprints: which model a trained drafter belongs to, and which tokenizer a text's token ids."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from specdec.errors import CheckpointError
from specdec.target import Target

__all__ = ["architecture", "fingerprint", "known_tokenizer", "tokenizer_fingerprint"]


def architecture(target: Target) -> str:
    """Class and sizes of a target, with which its fingerprint begins: known at once, where weights take a second."""
    shape = f"{target.num_layers}x{target.hidden_size}-v{target.vocab_size}"
    return f"{target.name}-{shape}"


def fingerprint(target: Target) -> str:
    """A target's architecture and a hash over a few values of each of its weights, the same in any dtype.

    Values are rounded to bfloat16 first, so a model saved in bfloat16 and loaded in float32 keeps its fingerprint.
    """
    digest = hashlib.sha256()
    for _, weight in target.named_weights():
        if not weight.is_meta:
            flat = weight.detach().reshape(-1)
            few = flat[:: max(1, len(flat) // 16)][:16].to("cpu", torch.bfloat16)
            digest.update(few.view(torch.int16).numpy().tobytes())
    return f"{architecture(target)}-{digest.hexdigest()[:16]}"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary: token ids mean nothing without it, and sizes may agree by chance."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def known_tokenizer(target: Target) -> str | None:
    """Fingerprint of the tokenizer beside a target's weights, in their folder or in the cache of a hub id, never loaded
    from elsewhere; None where it is not known, as for a model made in memory.
    """
    from specdec.models.tokenizer import load_tokenizer  # not at the top, as vLLM has other transformers

    if not target.path:
        return None
    try:
        return tokenizer_fingerprint(load_tokenizer(target.path, local_files_only=True))
    except CheckpointError:
        return None
