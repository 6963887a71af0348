"""Losses of guesses at the target's distribution."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["soft_loss"]


def soft_loss(
    guess: torch.Tensor, wanted: torch.Tensor, *, labels: str = "soft", top_k: int = 0, reduction: str = "sum"
) -> torch.Tensor:
    """The cross-entropy of logits ``guess`` [N, V] for the target's logits ``wanted`` [N, V]; in nats, summed over N.

    With ``reduction`` ``none``, the result is [N], one for each row.
    """
    if labels == "hard":
        return F.cross_entropy(guess, wanted.argmax(-1), reduction=reduction)
    if top_k:
        values, tokens = wanted.topk(min(top_k, wanted.shape[-1]), -1)
        chosen = guess.gather(-1, tokens) - guess.logsumexp(-1, keepdim=True)
        rows = -(torch.softmax(values, -1) * chosen).sum(-1)
        return rows if reduction == "none" else rows.sum()
    return F.cross_entropy(guess, torch.softmax(wanted, -1), reduction=reduction)
