"""Figures of an answer: usage, acceptance as vLLM tells it, llama-server's timings, and a step's trace for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specdec.results import Statistics, Step

__all__ = ["acceptance_of", "timings_of", "trace_json", "usage_of"]

Json = dict[str, Any]


def usage_of(prompt_tokens: int, new_tokens: int, stats: Sequence[Statistics], n: int, reasoning: int = 0) -> Json:
    """OpenAI's ``usage`` of a whole answer, whose prompts have ``n`` choices each, in order."""
    cached = sum(one.reused_tokens for one in stats[::n])
    accepted = sum(getattr(one, "accepted_prediction_tokens", 0) for one in stats)
    rejected = sum(getattr(one, "rejected_prediction_tokens", 0) for one in stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
            "reasoning_tokens": reasoning,
        },
    }


def acceptance_of(stats: Sequence[Statistics], max_rows: int, *, per_step: bool = False) -> Json:
    """vLLM's acceptance figures of a request; the bonus token counts in the mean length alone.

    A draft is a step that verified more rows than the root. With ``per_step``, each draft's accepted and drafted
    tokens are listed.
    """
    pairs = [
        (length - 1, rows - 1)
        for one in stats
        for length, rows in zip(one.acceptance_lengths, one.rows, strict=True)
        if rows > 1
    ]
    accepted, drafted = sum(one for one, _ in pairs), sum(rows for _, rows in pairs)
    found: Json = {
        "mean_acceptance_length": 1 + accepted / len(pairs) if pairs else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": {str(count): many for count, many in sorted(Counter(one for one, _ in pairs).items())},
        "num_spec_steps": len(pairs),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_rows - 1,
    }
    if per_step:
        found["per_step_accepted"] = [one for one, _ in pairs]
        found["per_step_drafted"] = [rows for _, rows in pairs]
    return found


def timings_of(stats: Sequence[Statistics]) -> Json:
    """llama-server's ``timings``: milliseconds of the request's own rows, without the time of rows beside them."""
    cached = sum(one.reused_tokens for one in stats)
    prompt = sum(one.prompt_tokens for one in stats) - cached
    new = sum(one.new_tokens for one in stats)
    prompt_ms = 1000 * sum(one.seconds.prefill for one in stats)
    new_ms = 1000 * sum(one.seconds.decode for one in stats)
    drafted = acceptance_of(stats, 0)
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0.0,
        "prompt_per_second": 1000 * prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": new,
        "predicted_ms": new_ms,
        "predicted_per_token_ms": new_ms / new if new else 0.0,
        "predicted_per_second": 1000 * new / new_ms if new_ms else 0.0,
        "draft_n": drafted["num_draft_tokens"],
        "draft_n_accepted": drafted["num_accepted_draft_tokens"],
    }


def trace_json(step: Step, tokenizer: Any) -> Json:
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
