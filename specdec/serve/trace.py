"""The trace of a step for the web page, as JSON: its tree, and the source of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.results import Step

__all__ = ["trace_json"]


def trace_json(step: Step, tokenizer: Any) -> dict[str, Any]:
    """A chunk's ``specdec`` object for a traced step; ``ms`` is the time since the text's first step, in milliseconds.

    Each text is a single token's; a character that spans several tokens has none.
    """
    trace = step.trace
    assert trace is not None

    def texts(tokens: Sequence[int]) -> list[str]:
        return [tokenizer.decode([token]) for token in tokens]

    return {
        "index": step.index,
        "ms": round(1000 * trace.seconds, 3),
        "rows": step.rows,
        "drafter": step.drafter,
        "token_ids": list(step.tokens),
        "texts": texts(step.tokens),
        "sources": list(trace.token_sources),
        "tree": {
            "token_ids": list(trace.tokens),
            "texts": texts(trace.tokens),
            "parents": list(trace.parents),
            "sources": list(trace.sources),
            "path": list(trace.path),
        },
    }
