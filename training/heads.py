"""The common part of training heads: a new head's sizes and first weights, the loss and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le

from drafters.heads.config import HeadConfig
from drafters.heads.loading import load_head
from drafters.heads.weights import HeadWeights
from drafters.kangaroo.adapter import fitting_heads
from drafters.shared.fingerprint import fingerprint
from drafters.shared.target_weights import head_weight, norm_weight
from drafters.shared.vocabulary import most_frequent
from specdec.errors import ConfigError
from specdec.target import Target
from training.acceptance import Tally, Written
from training.packing import Batch
from training.run import DrafterTraining, LabelConfig, parameters_of

__all__ = ["HeadTrainConfig", "HeadTraining", "begun", "started_head", "target_sizes"]

_UNSURE = 0.5  # scale of a new head's norm; at 1, random states' logits spread over several nats


@dataclass(frozen=True, kw_only=True)
class HeadTrainConfig(LabelConfig):
    """The common options of training heads, beside those of LabelConfig.

    Attributes:
        decay: weight ``decay ** k`` of the loss of a draft's token k, counted from 0.
    """

    decay: Annotated[float, Gt(0), Le(1), "a number in (0, 1]"] = 0.8


class HeadTraining(DrafterTraining):
    """The training of a head; subclasses add ``loss``, ``card`` and ``chains``.

    Attributes:
        depth: tokens of a draft.
    """

    config: HeadTrainConfig
    depth: int

    def __init__(self, head: HeadWeights, target: Target, texts: Sequence[Written], config: HeadTrainConfig) -> None:
        self.head = head
        super().__init__(head, target, texts, config, [tap for tap in head.config.taps if tap >= 0])

    def columns(self) -> dict[str, str]:
        """The figures of the evaluation that the card shows, and their titles."""
        titles = {f"accepted_{place}": f"draft {place} accepted" for place in range(1, self.depth + 1)}
        return {"tokens_per_step": "tokens per step", **titles}

    def card_words(self) -> tuple[str, str]:
        """The head's size and the matrix that gives its logits, in words."""
        matrix = "a matrix of its own" if self.head.config.own_head else "the target's own matrix"
        return f"{parameters_of(self.head):,} parameters", matrix

    def chains(self, text: Written) -> list[list[bool]]:
        """See :meth:`training.acceptance.Tally.add_chains`."""
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        tally = Tally(self.depth)
        for text in self.texts:
            tally.add_chains(self.chains(text))
        return tally.figures()

    def read(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's inputs [B, L, taps x D], and the target's last states [N, D] at the batch's targets."""
        features, states = self.frozen.read(batch)
        like = next(self.head.layers.parameters())
        return torch.cat([features[tap] for tap in self.head.config.taps], -1).to(like.dtype), states

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..., W] the target's embeddings of tokens."""
        like = next(self.head.layers.parameters())
        with torch.no_grad():
            found = self.frozen.target.embed(tokens.flatten()).to(tokens.device, like.dtype)
        return found.clone().unflatten(0, tokens.shape)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., d] logits of states behind the last norm, by the head's own matrix or the target's."""
        found: torch.Tensor = self.head.lm_head(states) if self.head.config.own_head else self.frozen.head(states)
        return found


def target_sizes(
    target: Target, taps: Sequence[int], *, heads: int, intermediate_size: int, least: int
) -> dict[str, Any]:
    """The fields of a new head's config that follow from the target; 0 for ``heads`` or an inner size takes its size.

    Raises:
        ConfigError: the target lacks a layer.
    """
    if not taps or min(taps) < least or max(taps) > target.num_layers or len({*taps}) < len(taps):
        raise ConfigError(
            f"head.taps is {[*taps]}; it takes hidden layers of the target, each once, from {least} to "
            f"{target.num_layers}"
        )
    own, size = target.config, target.hidden_size
    count = heads or fitting_heads(size, int(own.num_attention_heads))
    groups = int(getattr(own, "num_key_value_heads", None) or count)
    rope = getattr(own, "rope_parameters", None) or {}
    return {
        "hidden_size": size,
        "width": size,
        "vocab_size": target.vocab_size,
        "heads": count,
        "key_heads": groups if count % groups == 0 else count,
        "head_dim": size // count,
        "intermediate_size": intermediate_size or int(getattr(own, "intermediate_size", 4 * size)),
        "taps": [*taps],
        "norm_eps": float(getattr(own, "rms_norm_eps", 1e-6)),
        "rope": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        "positions": int(getattr(own, "max_position_embeddings", 4096)),
        "target": fingerprint(target),
        "target_layers": target.num_layers,
    }


def begun(head: Any, target: Target, counts: torch.Tensor | None, seed: int) -> Any:
    """Set a new head's first weights: random ones; the target's last norm, scaled so that guesses begin less sure; and
    the target's matrix, if the head has its own. The most frequent tokens in ``counts`` [V] are its draft vocabulary.
    """
    generator, config = torch.Generator().manual_seed(seed), head.config
    if head.draft_tokens is not None and counts is not None:
        head.draft_tokens.copy_(most_frequent(counts, config.draft_vocab))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
        head.norm.weight.copy_(_UNSURE * norm_weight(target))
        if config.own_head:
            head.lm_head.weight.copy_(head_weight(target, head.draft_tokens))
    return head


def started_head(made: Any, folder: str, drafter: str, kind: str, target: Target) -> Any:
    """The head in a folder, in any format that specdec reads, to train further for a target.

    Args:
        made: class of the result.
        drafter: name of the drafter that uses it.
        kind: kind that the head must have.

    Raises:
        CheckpointError: there is no head, or one of another size.
        ConfigError: the head is of another kind.
    """
    found = load_head(Path(folder), drafter, target, check_target=False)
    config: HeadConfig = found.config
    if config.kind != kind or config.own_embedding:  # type: ignore[attr-defined]
        what = "with an embedding of its own" if config.own_embedding else "of another kind"
        raise ConfigError(
            f"start is {folder!r}, a head {what}; training goes on from {kind} heads that read the target's embedding"
        )
    config = replace(config, target=fingerprint(target), target_layers=target.num_layers)
    head = made(config)
    head.load_state_dict(found.state_dict())
    return head
