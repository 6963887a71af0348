"""What guesses learn from: the target's distribution and the text, made once for all guesses at a place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from drafters.shared.vocabulary import number_in
from training.packing import Batch

__all__ = ["Labels", "labels_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The distributions that guesses at N places learn.

    Attributes:
        chances: [N, V], or [N, k] of ``tokens``.
        tokens: [N, k] int64, the tokens that have a chance; None for all V.
    """

    chances: torch.Tensor
    tokens: torch.Tensor | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        wanted: torch.Tensor,
        text: torch.Tensor | None = None,
        *,
        labels: str = "soft",
        top_k: int = 0,
        hard_share: float = 0.0,
    ) -> Labels:
        """Labels by the target's logits and the text's tokens.

        Args:
            wanted: [N, V] the target's logits, float32.
            text: [N] the text's tokens, -1 for one that cannot be guessed; needed for a ``hard_share``.
            labels, top_k, hard_share: see :class:`training.run.LabelConfig`.
        """
        tokens: torch.Tensor | None = None
        if labels == "hard":
            tokens = wanted.argmax(-1, keepdim=True)
            chances = torch.ones_like(tokens, dtype=wanted.dtype)
        elif top_k:
            values, tokens = wanted.topk(min(top_k, wanted.shape[-1]), -1)
            chances = torch.softmax(values, -1)
        else:
            chances = torch.softmax(wanted, -1)
        if text is None or not hard_share:
            return cls(chances, tokens)
        place, share = text.clamp(min=0)[:, None], hard_share * (text >= 0)[:, None].to(chances.dtype)
        chances = chances.mul_(1 - hard_share)
        if tokens is None:
            return cls(chances.scatter_add_(-1, place, share))
        return cls(torch.cat((chances, share), -1), torch.cat((tokens, place), -1))

    def loss(self, guess: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """[M] the cross-entropy in nats of logits ``guess`` [M, V] at ``places`` [M]; None is each place once."""
        chances = self.chances if places is None else self.chances[places]
        if self.tokens is None:
            return F.cross_entropy(guess, chances, reduction="none")
        said = guess.gather(-1, self.tokens if places is None else self.tokens[places])
        return guess.logsumexp(-1) * chances.sum(-1) - (said * chances).sum(-1)


def labels_of(config: Any, wanted: torch.Tensor, batch: Batch, draft_tokens: torch.Tensor | None) -> Labels:
    """The labels at a batch's N targets, as a :class:`training.run.LabelConfig` says.

    Args:
        config: the options.
        wanted: [N, V] the target's logits there, float32; [N, d] of a draft vocabulary.
        batch: the batch.
        draft_tokens: [d] the draft vocabulary; None for all tokens.
    """
    text = number_in(draft_tokens, batch.tokens.flatten()[batch.targets + 1])
    return Labels.of(wanted, text, labels=config.labels, top_k=config.top_k, hard_share=config.hard_share)
