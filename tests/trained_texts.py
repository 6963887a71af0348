"""What a sample trains, as texts."""

from __future__ import annotations

from typing import Any

from training.data import Sample


def trained_texts(sample: Sample, tokenizer: Any) -> list[str]:
    """The texts of the runs of trained tokens."""
    texts, run = [], list[int]()
    for token, trained in zip([*sample.tokens, 0], [*sample.trained, False], strict=True):
        if trained:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts
