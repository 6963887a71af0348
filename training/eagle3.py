"""Training an EAGLE-3 head on a frozen target (Li et al. 2025, arXiv 2503.01840, section 3.2).

Training-time test: a chain is drafted behind every position, as in decoding. Its first row reads the target's hidden
states, and each further row reads the head's own output for the row before, with the text's tokens. A chain's rows see
the rows of the text up to its begin, and each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import nn

from drafters.heads.config import ChainConfig, aux_layers
from drafters.heads.weights import Chain
from drafters.shared.vocabulary import number_in
from specdec.errors import ConfigError
from specdec.target import Target
from training.acceptance import Written
from training.card import CardText, among
from training.head_layers import Trained, attend, by_row
from training.heads import HeadTrainConfig, HeadTraining, begun, started_head, target_sizes
from training.losses import labels_of
from training.packing import Batch
from training.run import run_training

__all__ = ["Config", "Eagle3Training", "NewHead", "TrainedChain", "followed", "new_head", "run"]

Depth = Annotated[int, Ge(1), Le(16), "an integer from 1 to 16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHead:
    """The head to train; see :class:`drafters.heads.config.ChainConfig`.

    With empty ``taps``, they are EAGLE-3's. With 0, ``heads`` and ``intermediate_size`` are about the target's.
    """

    taps: list[int] = field(default_factory=list)
    heads: int = 0
    intermediate_size: int = 0
    draft_vocab: int = 0
    own_head: bool = False
    norm_inputs: Literal["none", "whole", "each"] = "none"
    norm_before_residual: bool = False
    norm_output: bool = False


@dataclass(frozen=True, kw_only=True)
class Config(HeadTrainConfig):
    """The options of an EAGLE-3 training, beside those of HeadTrainConfig.

    Attributes:
        depth: tokens of a chain in training.
        judged_depth: tokens of a chain on held-out texts.
        head: the new head, see its class; unused with ``start``, which trains an existing one.
    """

    out: str = "runs/eagle3"
    depth: Depth = 3
    judged_depth: Depth = 6
    head: NewHead = field(default_factory=NewHead)


class TrainedChain(Trained, Chain):
    """An EAGLE-3 head of one layer that drafts behind many positions at once, with gradients."""

    def __init__(self, config: ChainConfig, taps: int) -> None:
        if config.layers > 1:
            raise ConfigError(f"the head has {config.layers} layers, and `specdec train eagle3` trains those of one")
        super().__init__(config, taps)

    def forward(
        self,
        features: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor,
        rows: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """States [N_s, W] behind the last norm, for each token s of the chains.

        Args:
            features: [B, L, taps x D] the target's hidden states.
            embedded: [B, L, W] embeddings of the texts' tokens.
            positions, documents: [B, L], see :class:`training.packing.Batch`.
            rows: for each s, [N_s] rows of the flattened [B * L] whose chains have a token s, ascending, a subset of
                those before. Row i reads the features of place i and the token behind it; token s of its chain is
                guessed with token i + 1 + s.
        """
        own, (windows, length) = self.live(), features.shape[:2]
        end, places = length + len(rows), positions.flatten()
        tokens = F.pad(embedded.flatten(0, 1), (0, 0, 0, len(rows) + 1))  # rows behind the last
        states = fused = own.fused(features.flatten(0, 1))
        _, every = own.entering(tokens[1 : len(places) + 1], fused)
        assert every is not None
        text = own.keys_values(0, every, self.angles(places, end, fused))
        keys, values = (by_row(part).unflatten(0, (windows, length)) for part in text)
        guesses, said = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
        before = torch.arange(windows * length, device=fused.device)
        for number, chosen in enumerate(rows):
            kept = torch.searchsorted(before, chosen)
            states, before = states[kept], chosen
            said = [(key[kept], value[kept]) for key, value in said]
            hidden, reads = own.entering(tokens[chosen + 1 + number], states)
            assert reads is not None
            query, *drafted = map(by_row, own.heads(0, reads, self.angles(places[chosen] + number, end, states)))
            if number:
                said.append((drafted[0], drafted[1]))
            beside = [torch.stack(part, 1) for part in zip(*said, strict=True)]
            both = (beside[0], beside[1]) if beside else None
            counts = torch.bincount(chosen // length, minlength=windows).tolist()
            found = attend(query, (keys, values), both, self._seen(chosen, documents), counts).flatten(1)
            guess, states = own.ends(own.through(hidden, lambda *_, found=found: found))
            guesses.append(guess)
        return guesses

    @staticmethod
    def _seen(rows: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """[N, L] bool, what each row sees of its window: its own piece of text up to itself."""
        length = documents.shape[1]
        window, place = rows // length, rows % length
        same = documents[window] == documents.flatten()[rows][:, None]
        return same & (torch.arange(length, device=rows.device) <= place[:, None])


class Eagle3Training(HeadTraining):
    """The training of an EAGLE-3 head."""

    config: Config
    head: TrainedChain
    least = 2

    def __init__(self, head: TrainedChain, target: Target, texts: Sequence[Written], config: Config) -> None:
        self.depth = config.judged_depth
        super().__init__(head, target, texts, config)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        features, states = self.read(batch)
        with torch.no_grad():
            wanted = self.frozen.head(states).float()
        labels = labels_of(self.config, wanted, batch, self.head.draft_tokens)
        chains = [chain for chain in followed(batch, self.config.depth) if len(chain[0])]  # short answers have few
        rows = [batch.targets[kept] for kept, _ in chains]
        guesses = module(features, self.embedded(batch.tokens), batch.positions, batch.documents, rows)
        total = states.new_zeros((), dtype=torch.float32)
        for number, (guess, (_, places)) in enumerate(zip(guesses, chains, strict=True)):
            loss = labels.loss(self.logits(guess).float(), places)
            total = total + self.config.decay**number * loss.sum()
        return total

    def chains(self, text: Written) -> list[list[bool]]:
        guesses = self.guesses(text, self.depth)
        chains: list[list[bool]] = [[] for _ in range(len(text.tokens) - text.prompt)]
        for number, logits in enumerate(guesses):
            wanted = torch.tensor(text.tokens[text.prompt + number :], device=logits.device)
            right = logits.argmax(-1) == number_in(self.head.draft_tokens, wanted)
            for chain, one in zip(chains, right.tolist(), strict=False):
                chain.append(one)
        return chains

    @torch.no_grad()
    def guesses(self, text: Written, depth: int) -> list[torch.Tensor]:
        """For each token s of a chain the logits [N - s, d], for chains behind the prompt's last token and behind each
        of the N new tokens except the last.
        """
        batch, new = self.batch_of(text, 0, 1), len(text.tokens) - text.prompt
        features, _ = self.read(batch)
        first = torch.arange(text.prompt - 2, len(text.tokens) - 2, device=features.device)
        rows = [first[: new - number] for number in range(min(depth, new))]
        states = self.head(features, self.embedded(batch.tokens), batch.positions, batch.documents, rows)
        return [self.logits(state) for state in states]

    def card(self) -> CardText:
        own, size, matrix = self.head.config, *self.card_words()
        return CardText(
            title="EAGLE-3 head",
            about=f"an EAGLE-3 head of {size} over hidden layers {own.taps}",
            opening=f"An EAGLE-3 head for `{own.target}` over its hidden layers {own.taps}, {size}, {matrix} on "
            f"top{among(own.draft_vocab)}. The target stays as it was.",
            columns=self.columns(),
            note=f"Chains of {self.depth} tokens. Tokens per step count the bonus token.",
        )


def followed(batch: Batch, depth: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each token s of a chain: the indices in ``batch.targets`` of rows with trained places 1, ..., s + 1 behind
    them in the same text, and of the places s + 1 behind them.

    Example: targets 0 1 2 5 6 of one window, where 5 and 6 are another text. For s = 0 there are the chains of 0 1 5
    (indices 0 1 3) with the places 1 2 6 (1 2 4); for s = 1 there is the chain of 0 with the place 2.
    """
    targets, documents = batch.targets, batch.documents
    length, pieces = documents.shape[1], documents.flatten()
    index = torch.full((documents.numel() + depth + 1,), -1, device=targets.device)
    index[targets] = torch.arange(len(targets), device=targets.device)
    found, kept = [], torch.arange(len(targets), device=targets.device)
    for number in range(1, depth + 1):
        first = targets[kept]
        later = first + number
        same = (first // length == later // length) & (pieces[first] == pieces[later.clamp(max=len(pieces) - 1)])
        kept = kept[same & (index[later] >= 0)]
        found.append((kept, index[targets[kept] + number]))
    return found


def new_head(
    config: NewHead, target: Target, *, counts: torch.Tensor | None = None, depth: int = 0, seed: int = 0
) -> TrainedChain:
    """An untrained head for a target; ``counts`` [V] of the data's tokens decide its draft vocabulary.

    It begins by passing the last of its taps on: the layer's branches add nothing. From there 40 steps came to a loss
    of 4.3 nats on held-out text of SmolLM2, and from random weights to 4.9.

    Raises:
        ConfigError: the target lacks a layer.
    """
    taps = config.taps or aux_layers(target.num_layers)
    sizes = target_sizes(target, taps, heads=config.heads, intermediate_size=config.intermediate_size, least=0)
    head = TrainedChain(
        ChainConfig(
            kind="eagle3",
            layers=1,
            depth=depth,
            draft_vocab=config.draft_vocab,
            own_head=config.own_head,
            norm_inputs=config.norm_inputs,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
            **sizes,
        ),
        len(taps),
    )
    begun(head, target, counts, seed)
    layer: Any = head.layers[0]
    with torch.no_grad():
        width, inputs = head.fc.weight.shape
        head.fc.weight.zero_()[:, inputs - width :].copy_(torch.eye(width))
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return head


def run(config: Config, *, dry_run: bool = False) -> dict[str, float]:
    """Train a head; see :func:`training.run.run_training`."""

    def make(config: Config, target: Target, counts: torch.Tensor) -> TrainedChain:
        if config.start is not None:
            head: TrainedChain = started_head(
                lambda own: TrainedChain(own, len(own.taps)), config.start, "eagle", "eagle3", target
            )
            return head
        return new_head(config.head, target, counts=counts, depth=config.judged_depth, seed=config.loop.seed)

    return run_training(config, "eagle.head", make, Eagle3Training, dry_run=dry_run)
