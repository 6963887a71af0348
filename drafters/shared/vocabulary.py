"""A draft vocabulary: the d tokens that a drafter with a head can propose.

A head over all tokens can be a fifth of a small model, and most of its rows belong to rare tokens. So a drafter scores
only the most frequent tokens, with their rows of the target's head (FR-Spec, Zhao et al. 2025, arXiv 2502.14856;
EAGLE-3's ``d2t``). The training data decide which tokens, and the weights' file stores them as ``draft_tokens``. Other
tokens are never proposed, which costs acceptance but not exactness: their probability under q is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from specdec.errors import CheckpointError
from specdec.native.scores import chances
from specdec.sampling.noise import Noise
from specdec.target import Target

__all__ = [
    "DraftVocabulary",
    "check_draft_tokens",
    "coupled",
    "most_frequent",
    "number_in",
    "processed",
    "ranks_of",
    "token_counts",
    "top_k",
]


class DraftVocabulary:
    """Converts indices of a draft vocabulary to tokens and back; without ``tokens`` both are equal.

    Attributes:
        tokens: [d] int64, ascending, or None.
        head: the target's head over these tokens, [..., D] to [..., d].
        size: d.
    """

    head: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, tokens: torch.Tensor | None, target: Target) -> None:
        self.tokens, self._size = tokens, target.vocab_size
        self.size = target.vocab_size if tokens is None else len(tokens)
        self.head = target.head if tokens is None else target.head_of(tokens)
        self._listed: list[int] | None = None if tokens is None else tokens.tolist()

    def token(self, number: int) -> int:
        """The token with this index."""
        return number if self._listed is None else self._listed[number]

    def noise(self, whole: Noise) -> Noise:
        """The noise of these tokens, by index."""
        return whole if self.tokens is None else whole.among(self.tokens)

    def tokens_at(self, numbers: torch.Tensor) -> torch.Tensor:
        """The tokens with these indices, int64 [N]."""
        return numbers if self.tokens is None else self.tokens[numbers]

    def spread(self, values: torch.Tensor, rest: float) -> torch.Tensor:
        """[V] values from [d] values, with ``rest`` for all other tokens."""
        if self.tokens is None:
            return values
        return values.new_full((self._size,), rest).index_copy_(0, self.tokens, values)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[d] values of the vocabulary's tokens from [V] values."""
        return values if self.tokens is None else values[self.tokens]


def processed(scores: torch.Tensor, ids: torch.Tensor, processors: Iterable[Any]) -> torch.Tensor:
    """[N, V] scores after all processors; transformers' own list inspects each processor's signature every time."""
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def coupled(scores: torch.Tensor, noise: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """Logits of the tokens that the target will draw, from guessed ``scores`` that are divided by the temperature.

    Where the target draws with the same ``noise``, the largest sum of a score and its noise is a guess of the drawn
    token (Daliri et al. 2024); the larger its lead, the likelier it is right. The error of the guessed logits does not
    depend on the temperature, so the sums are scaled back to logits before a softmax. Without noise the result is the
    guess itself.
    """
    return (scores + noise) * temperature


def top_k(
    scores: torch.Tensor, count: int, noise: Noise | None, position: int, temperature: float
) -> tuple[list[list[int]], list[list[float]]] | None:
    """The indices of the ``count`` likeliest tokens in each row of ``scores`` [R, d] or [d], and their chances.

    With ``noise``, these are the tokens that the target will likely draw from ``position`` on, see :func:`coupled`.
    None where torch has to compute them.
    """
    if noise is None:
        return chances(scores, count)
    return noise.foreseen(scores, position, temperature, count)


def most_frequent(counts: torch.Tensor, size: int) -> torch.Tensor:
    """[size] int64 tokens, ascending: those with the largest ``counts`` [V]; of equal counts, the lower token.

    Low tokens are a tokenizer's early merges, so they are also a fair choice among tokens that never occur.
    """
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def token_counts(texts: Iterable[Iterable[int]], vocab_size: int) -> torch.Tensor:
    """[V] int64, how often each token occurs in the texts."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(torch.tensor(list(text), dtype=torch.int64), minlength=vocab_size)
    return counts


def number_in(drafted: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """The indices of ``tokens`` in a draft vocabulary; -1 for tokens outside it."""
    if drafted is None:
        return tokens
    places = torch.searchsorted(drafted, tokens).clamp(max=len(drafted) - 1)
    return torch.where(drafted[places] == tokens, places, -1)


def ranks_of(guess: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The rank [N] of the guess with index ``right`` [N] among the scores [N, d]; an index of -1 has rank d."""
    own = guess.gather(1, right.clamp(min=0)[:, None])
    return torch.where(right < 0, guess.shape[1], (guess > own).sum(1))


def check_draft_tokens(tokens: torch.Tensor | None, vocab_size: int, source: Path) -> None:
    """Raises CheckpointError where the tokens are not ascending token ids of the vocabulary."""
    if tokens is None:
        return
    if tokens.is_floating_point() or not (
        bool((tokens.diff() > 0).all()) and int(tokens[0]) >= 0 and int(tokens[-1]) < vocab_size
    ):
        raise CheckpointError(
            f"draft_tokens in {str(source)!r} are no ascending tokens in [0, {vocab_size}); the file is broken or of "
            "another model"
        )
