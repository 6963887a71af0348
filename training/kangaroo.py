"""Training Kangaroo's adapter: soft-label cross-entropy on a frozen target (Liu et al. 2024, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from drafters.kangaroo.adapter import Adapter, AdapterConfig, fitting_heads
from drafters.shared.fingerprint import fingerprint
from drafters.shared.vocabulary import most_frequent, number_in, ranks_of
from specdec.errors import ConfigError
from specdec.target import Target
from training.acceptance import Tally, Written
from training.card import CardText, among
from training.choice import Settle
from training.losses import labels_of
from training.packing import Batch
from training.run import DrafterTraining, LabelConfig, parameters_of, run_training, started

__all__ = ["Config", "KangarooTraining", "NewAdapter", "new_adapter", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAdapter:
    """The adapter to train; see AdapterConfig.

    With 0, ``heads`` and ``intermediate_size`` are about the target's, and with ``heads`` 0, ``key_heads`` too.
    """

    exit_layer: int = 2
    variant: str = "attention"
    heads: int = 0
    key_heads: int = 0
    draft_vocab: int = 0
    intermediate_size: int = 0
    eta: float | None = None
    gamma: int = 6
    branch: int = 1


@dataclass(frozen=True, kw_only=True)
class Config(LabelConfig):
    """The options of an adapter's training, beside those of LabelConfig.

    Attributes:
        adapter: the new adapter, see its class; unused with ``start``, which trains an existing one.
    """

    out: str = "runs/kangaroo"
    adapter: NewAdapter = field(default_factory=NewAdapter)


class KangarooTraining(DrafterTraining):
    """The training of an adapter."""

    config: Config

    def __init__(self, adapter: Adapter, target: Target, texts: Sequence[Written], config: Config) -> None:
        self.adapter, self._layer = adapter, adapter.config.exit_layer
        super().__init__(adapter, target, texts, config, [self._layer])

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        features, states = self.frozen.read(batch)
        with torch.no_grad():
            wanted = self.frozen.head(states).float()
        labels = labels_of(self.config, wanted, batch, self.adapter.draft_tokens)
        guess = module(
            features[self._layer].float(), batch.positions, self.frozen.head, mask=batch.mask, rows=batch.targets
        )
        return labels.loss(guess.float()).sum()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        config = self.adapter.config
        tally, matched, count = Tally(config.gamma), 0.0, 0
        for text in self.texts:
            ranks, confidence, overlap = self.judge(text)
            trusted = [config.eta is None or c > config.eta for c in confidence]
            right = [rank < (1 if sure else config.branch) for rank, sure in zip(ranks, trusted, strict=True)]
            tally.add(right, trusted)
            matched, count = matched + overlap, count + len(ranks)
        return {**tally.figures(), "overlap": matched / max(count, 1)}

    def judge(self, text: Written) -> tuple[list[int], list[float], float]:
        """The rank of each new token among the guesses, 0 for the best; the probability of each best guess; and the sum
        of ``min(p, q)`` over all new tokens.
        """
        batch = self.batch_of(text, text.prompt - 1, len(text.tokens) - 1)
        features, states = self.frozen.read(batch)
        early = features[self._layer].to(self.adapter.norm.dtype)
        guess = self.adapter(early, batch.positions, self.frozen.head, rows=batch.targets).float()
        q = torch.softmax(guess, -1)
        p = torch.softmax(self.frozen.target.head(states).float(), -1)
        drafted = self.adapter.draft_tokens
        overlap = torch.minimum(p if drafted is None else p[:, drafted], q).sum()
        ranks = ranks_of(guess, number_in(drafted, batch.tokens[0, batch.targets + 1]))
        return ranks.tolist(), q.max(-1).values.tolist(), float(overlap)

    def card(self) -> CardText:
        own, size = self.adapter.config, f"{parameters_of(self.adapter):,} parameters"
        head = "the target's own head" if self.adapter.head is None else "a head of its own"
        columns = {"tokens_per_step": "tokens per step", "overlap": "overlap"}
        columns |= {f"accepted_{place}": f"draft {place} accepted" for place in range(1, own.gamma + 1)}
        columns |= {f"ctar_{w}": f"CTAR({w})" for w in range(1, 7)}
        return CardText(
            title="Kangaroo adapter",
            about=f"adapter of {size} behind layer {own.exit_layer}",
            opening=f"Drafts for `{own.target}` from the features behind its layer {own.exit_layer}: variant "
            f"`{own.variant}`, {size}, {head} on top{among(own.draft_vocab)}. The target stays as "
            "it was.",
            columns=columns,
            note=f"Eta {'by cost' if own.eta is None else own.eta}, gamma {own.gamma}, branch {own.branch}. "
            "Tokens per step count the bonus token; "
            "overlap is the mean of sum(min(p, q)); CTAR(w) is the share of steps that accept w drafts or more.",
        )


def new_adapter(config: NewAdapter, target: Target, *, counts: torch.Tensor | None = None, seed: int = 0) -> Adapter:
    """An untrained adapter for a target; ``counts`` [V] of the data's tokens decide its draft vocabulary.

    Raises:
        ConfigError: the target lacks the exit layer.
    """
    if not 1 <= config.exit_layer < target.num_layers:
        raise ConfigError(
            f"adapter.exit_layer is {config.exit_layer}; the model has {target.num_layers} layers, so it must be in "
            f"[1, {target.num_layers - 1}]"
        )
    size, own = target.hidden_size, target.config
    heads = config.heads or fitting_heads(size, int(own.num_attention_heads))
    groups = int(getattr(own, "num_key_value_heads", None) or heads)
    inner = config.intermediate_size or int(getattr(own, "intermediate_size", 4 * size))
    options = {
        **asdict(config),
        "heads": heads,
        "key_heads": config.key_heads if config.heads or heads % groups else groups,
        "intermediate_size": inner if config.variant in ("layer", "mlp") else 0,
        "norm_eps": float(getattr(own, "rms_norm_eps", 1e-6)),
        "target": fingerprint(target),
    }
    adapter = Adapter(AdapterConfig(hidden_size=size, vocab_size=target.vocab_size, **options))
    if adapter.draft_tokens is not None and counts is not None:
        adapter.draft_tokens.copy_(most_frequent(counts, config.draft_vocab))
    adapter.start_from(target, seed=seed)
    return adapter


def run(config: Config, *, dry_run: bool = False, settle: Settle | None = None) -> dict[str, float]:
    """Train an adapter; see :func:`training.run.run_training`."""

    def make(config: Config, target: Target, counts: torch.Tensor) -> Any:
        if config.start is not None:
            return started(Adapter, config.start, target, "kangaroo")
        return new_adapter(config.adapter, target, counts=counts, seed=config.loop.seed)

    return run_training(config, "kangaroo.adapter", make, KangarooTraining, dry_run=dry_run, settle=settle)
