"""Whether two things were made with one tokenizer: token ids mean nothing without it, and sizes may agree by chance."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import AutoTokenizer

from specdec.target import Target

__all__ = ["fingerprint_at", "fingerprint_of", "tokenizer_fingerprint"]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def fingerprint_at(path: str) -> str | None:
    """The fingerprint of the tokenizer in a folder, or in the cache of a hub id; None if there is none. No download."""
    if not path:
        return None
    try:
        return tokenizer_fingerprint(AutoTokenizer.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError, KeyError):
        return None


def fingerprint_of(target: Target) -> str | None:
    """That of the tokenizer beside a target's weights; None where it is not known, as for a model made in memory."""
    return fingerprint_at(str(getattr(getattr(target, "model", None), "name_or_path", "") or ""))
