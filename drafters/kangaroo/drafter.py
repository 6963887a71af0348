"""Kangaroo (Liu, Tang, Liu, Ni, Wang and Han 2024, arXiv 2404.18911): the target's first layers draft for it.

A round runs the newest token through layers [0, l), keeps its feature, and the adapter guesses the next token from it.
In the paper a round ends after gamma guesses, or after a guess whose confidence is at most eta, which is kept.

Without an eta, a round goes on while it pays. A token of a guess is drafted if its chance exceeds the price of its row
in verification, provided that all drafted tokens together pay for a shallow pass. The next guess is made behind the
likeliest token if its chance also pays for adapter and head; the same pass of the adapter guesses behind other tokens
whose chances pay for a row of it.

Verification enters at layer l with the kept features, so no layer runs twice for a token, and draft and verification
share one cache. When sampling, tokens are ranked with the noise that the target will draw with.

On a device nothing is read before the step is verified. There the chance of a token is the share of tokens of its rank
that were right in finished steps, so that the rows of a round are decided before its guesses are computed. An eta must
be compared with each guess; so a chain's next shallow pass is launched first, and the device has work while the host
waits (docs/gpu.md has the calculation).

The adapter has its own cache (:mod:`drafters.shared.own_cache`), in which a token's row reads that token's feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drafters.kangaroo.adapter import Adapter, AdapterConfig
from drafters.kangaroo.adapter_step import AdapterStep
from drafters.kangaroo.session import KangarooSession
from drafters.shared.own_cache import Nodes
from drafters.shared.vocabulary import DraftVocabulary
from drafters.shared.weights import check_fit, weights_folder
from specdec.drafter import Context, DrafterBase
from specdec.errors import CheckpointError, ConfigError, shown
from specdec.settings.parsing import check_positive
from specdec.target import Target

__all__ = ["Kangaroo", "KangarooConfig", "check_adapter"]

_BRANCH = 8  # most tokens of a guess that are verified because they pay


@dataclass(frozen=True, slots=True, kw_only=True)
class KangarooConfig:
    """Options.

    Attributes:
        adapter: folder of a trained adapter; None takes the one in this package that was trained for the model.
        exit_layer: draft without an adapter: exit after this layer through the target's own norm and head, for models
            that were trained for it (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710). The head then runs for every
            guess.
        eta: confidence at or below which a round ends; None takes the adapter's eta. If that is None, too, a round
            goes on while it pays: a token is verified if its chance exceeds the price of its row. On a device, chances
            are the shares of earlier tokens of the same rank that were right.
        gamma: most guesses of a round; None takes the adapter's gamma.
        branch: number of alternatives for the last token of a round that ends at eta; 1 is the paper's chain; None
            takes the adapter's value. Without an eta, the most tokens of any guess, 8 for None; 1 under ``reject``.
        check_target: refuse a model that is not the one the adapter was trained for.
    """

    adapter: str | None = None
    exit_layer: int | None = None
    eta: float | None = None
    gamma: int | None = None
    branch: int | None = None
    check_target: bool = True

    def __post_init__(self) -> None:
        if self.eta is not None and not 0 <= self.eta <= 1:
            raise ConfigError(f"kangaroo.eta is {self.eta}; it is a probability, in [0, 1]")
        check_positive("kangaroo.", gamma=self.gamma, branch=self.branch, exit_layer=self.exit_layer)
        if self.adapter is not None and self.exit_layer is not None:
            raise ConfigError(
                f"kangaroo.exit_layer={shown(self.exit_layer)} drafts without an adapter, and kangaroo.adapter is "
                f"{self.adapter!r}; give one of them"
            )


class Kangaroo(DrafterBase):
    """A trained adapter, and the rule by which a round stops."""

    name = "kangaroo"
    draws = False
    Config = KangarooConfig

    def __init__(self, config: KangarooConfig, adapter: Adapter, target: Target) -> None:
        super().__init__(config)
        target.check_layers(self.name)
        self.vocabulary = DraftVocabulary(adapter.draft_tokens, target)
        self.adapter = AdapterStep(adapter, self.vocabulary.head, target.norm)
        self.batch_invariant = self.adapter.batch_invariant and target.batch_invariant
        self.exit_layer = adapter.config.exit_layer
        self.eta = adapter.config.eta if config.eta is None else config.eta
        self.gamma = adapter.config.gamma if config.gamma is None else config.gamma
        own = adapter.config.branch if self.eta is not None else _BRANCH
        self.branch = own if config.branch is None else config.branch
        self.taps = frozenset({self.exit_layer})
        # What is read by a shallow pass, and by adapter and head for a guess.
        self.shallow_weights = target.layer_weights * self.exit_layer / target.num_layers
        head = (adapter.config.draft_vocab or target.vocab_size) * target.hidden_size
        self.guess_weights = head + sum(weight.numel() for weight in adapter.parameters())

    def warm_up(self, target: Target, rows: int, sequences: int) -> None:
        most = min(rows, self.gamma * self.branch + 1)
        target.warm_up(most, sequences=sequences, taps=self.taps, exit_layer=self.exit_layer, levels=most)

    @classmethod
    def build(cls, config: KangarooConfig, target: Target) -> Kangaroo:
        """Load the adapter for a target.

        Raises:
            CheckpointError: no adapter, a broken one, or one of another model.
        """
        if config.exit_layer is None:
            source = (
                "Train some with `specdec train kangaroo --model ...`, or read a published adapter with "
                "`specdec convert kangaroo FOLDER`,"
            )
            folder = weights_folder(config.adapter, target, "kangaroo.adapter", source=source)
            adapter = Adapter.from_pretrained(folder)
        else:
            size, vocabulary, layer = target.hidden_size, target.vocab_size, config.exit_layer
            adapter = Adapter(
                AdapterConfig(hidden_size=size, vocab_size=vocabulary, heads=1, exit_layer=layer, variant="none")
            )
        check_adapter(adapter.config, target, check_target=config.check_target)
        return cls(config, adapter.to(target.head_device, target.dtype).requires_grad_(False).eval(), target)

    @classmethod
    def describe_weights(cls, folder: Path) -> list[str]:
        """A description of the weights in a folder, for ``specdec drafters --check``.

        Raises:
            CheckpointError: no adapter, or a broken one.
        """
        own = Adapter.from_pretrained(folder).config
        sizes = f"width {own.hidden_size}, vocabulary {own.vocab_size}"
        return [
            f"a Kangaroo adapter, variant {own.variant}, behind layer {own.exit_layer}",
            f"for {own.target or 'a model'}: {sizes}",
            f"use it with --drafter {cls.name} --set {cls.name}.adapter={folder}",
        ]

    def start(self, context: Context) -> KangarooSession:
        return KangarooSession(self, context)

    def guess(self, brought: Sequence[Nodes]) -> Sequence[torch.Tensor]:
        """[N, d] logits of what follows the nodes that each sequence brought."""
        return self.adapter.guess(brought)


def check_adapter(config: AdapterConfig, target: Target, *, check_target: bool = True) -> None:
    """Raises CheckpointError where an adapter cannot serve a target, or was trained for another one."""
    check_fit(config, target, Kangaroo.name, check_target=check_target)
    if config.exit_layer >= target.num_layers:
        raise CheckpointError(
            f"drafting leaves behind layer {shown(config.exit_layer)}, and the model has {target.num_layers} layers; "
            f"the exit layer must be in [1, {target.num_layers - 1}]"
        )
