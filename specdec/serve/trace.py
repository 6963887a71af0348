"""What the page is told of each step: its tree, and where its tokens came from, as JSON has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.results import Step

__all__ = ["trace_json"]


def trace_json(step: Step, tokenizer: Any) -> dict[str, Any]:
    """The ``specdec`` object of a chunk, of a step that was traced; ``ms`` counts from the text's first step.

    Texts are those of single tokens, so that a character of several tokens has none.
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
