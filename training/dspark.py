"""Training a DSpark head on a frozen target: blocks of masks at random places, a bias that depends on the token before,
and a head that estimates acceptance.

A block is trained as it is drafted: its first row has the text's token, the others have masks. Its rows see the text
before the block, through the target's hidden states, and each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import nn

from drafters.heads.config import BlockConfig
from drafters.heads.weights import Block
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

__all__ = ["Blocks", "Config", "DSparkTraining", "NewHead", "TrainedBlock", "anchors_of", "new_head", "run"]

_ACCEPTANCE_WEIGHT = 0.5  # of the acceptance head's loss, in nats, beside the tokens' loss


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHead:
    """The head to train; see :class:`drafters.heads.config.BlockConfig`.

    With empty ``taps``, the head reads a layer near the target's begin, one in its middle and one near its end. With 0,
    ``heads`` and ``intermediate_size`` are about the target's. With None, ``mask_token`` is the data's rarest token.
    """

    layers: int = 2
    block_size: int = 7
    taps: list[int] = field(default_factory=list)
    heads: int = 0
    intermediate_size: int = 0
    draft_vocab: int = 0
    own_head: bool = False
    markov_rank: int = 16
    mask_token: int | None = None


@dataclass(frozen=True, kw_only=True)
class Config(HeadTrainConfig):
    """The options of a DSpark training, beside those of HeadTrainConfig.

    Attributes:
        anchors: number of blocks trained in a window, at random places among its trained tokens.
        acceptance: what the acceptance head learns: ``choice``, whether the likeliest token is the text's, its chance
            at T=0; or ``overlap``, the sum of min(p, q), the chance that rejection accepts a drawn token.
        head: the new head, see its class; unused with ``start``, which trains an existing one.
    """

    out: str = "runs/dspark"
    anchors: Annotated[int, Ge(1), Le(65_536), "an integer from 1 to 65536"] = 64
    acceptance: Literal["choice", "overlap"] = "choice"
    head: NewHead = field(default_factory=NewHead)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The results for A blocks of B tokens: ``hidden`` [A, B, W] states behind the last norm, the ``bias`` [A, B, d] of
    the token before (None without one), and ``acceptance`` [A, B], the logit of the chance.
    """

    hidden: torch.Tensor
    bias: torch.Tensor | None
    acceptance: torch.Tensor


class TrainedBlock(Trained, Block):
    """A DSpark head that drafts at many places at once, with gradients."""

    def forward(
        self,
        features: torch.Tensor,
        embedded: torch.Tensor,
        before: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor,
        anchors: torch.Tensor,
    ) -> Blocks:
        """Run blocks at the anchors.

        Args:
            features: [B, L, taps x D] the target's hidden states.
            embedded: [A, block, W] embeddings of each block's tokens: the text's token, and masks.
            before: [A, block] int64, the text's token before each row's guess.
            positions, documents: [B, L], see :class:`training.packing.Batch`.
            anchors: [A] rows of the flattened [B * L] at which blocks begin, ascending.
        """
        own, config, (windows, length) = self.live(), self.config, features.shape[:2]
        size, end, places = config.block_size, length + config.block_size, positions.flatten()
        context = own.fused(features.flatten(0, 1))
        rows = places[anchors][:, None] + torch.arange(size, device=anchors.device)
        text_angles, angles = self.angles(places, end, context), self.angles(rows.flatten(), end, context)
        counts = (torch.bincount(anchors // length, minlength=windows) * size).tolist()
        seen = self._seen(anchors, documents).repeat_interleave(size, 0)

        def attends(place: int, inputs: torch.Tensor) -> torch.Tensor:
            keys, values = map(by_row, own.keys_values(place, context, text_angles))
            text = keys.unflatten(0, (windows, length)), values.unflatten(0, (windows, length))
            query, *drafted = map(by_row, own.heads(place, inputs, angles))
            key, value = (part.unflatten(0, (-1, size)).repeat_interleave(size, 0) for part in drafted)
            return attend(query, text, (key, value), seen, counts).flatten(1)

        hidden, _ = own.ends(own.through(embedded.flatten(0, 1), attends))
        hidden = hidden.unflatten(0, (-1, size))
        if not config.markov_rank:
            return Blocks(hidden, None, self.confidence_head.proj(hidden)[..., 0])
        known = self.markov_head.markov_w1(before)
        acceptance = self.confidence_head.proj(torch.cat((hidden, known), -1))[..., 0]
        return Blocks(hidden, self.markov_head.markov_w2(known), acceptance)

    @staticmethod
    def _seen(anchors: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """[A, L] bool, what each block sees of its window: its own piece of text before the block."""
        length = documents.shape[1]
        window, place = anchors // length, anchors % length
        same = documents[window] == documents.flatten()[anchors][:, None]
        return same & (torch.arange(length, device=anchors.device) < place[:, None])


class DSparkTraining(HeadTraining):
    """The training of a DSpark head."""

    config: Config
    head: TrainedBlock

    def __init__(self, head: TrainedBlock, target: Target, texts: Sequence[Written], config: Config) -> None:
        self.depth = head.config.block_size
        super().__init__(head, target, texts, config)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        features, states = self.read(batch)
        with torch.no_grad():
            wanted = self.frozen.head(states).float()
        labels = labels_of(self.config, wanted, batch, self.head.draft_tokens)
        anchors, places = anchors_of(batch, self.config.anchors, self.depth, self.config.loop.seed)
        said = self._said(module, batch, features, anchors)
        there = places >= 0
        chosen, depth = places[there], torch.arange(self.depth, device=anchors.device).expand(places.shape)[there]
        guess = self._guessed(said, there).float()
        weights = self.config.decay**depth
        losses = labels.loss(guess, chosen)
        with torch.no_grad():
            right = self._accepted(guess, wanted[chosen])
        losses = losses + _ACCEPTANCE_WEIGHT * F.binary_cross_entropy_with_logits(
            said.acceptance[there].float(), right, reduction="none"
        )
        # The drawn blocks stand for all places, so the loss is scaled to all of them.
        return (losses * weights).sum() / weights.sum().clamp_min(1e-9) * len(batch.targets)

    def _accepted(self, guess: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """[N] the acceptance head's labels for guesses [N, d]."""
        if self.config.acceptance == "choice":
            return (guess.argmax(-1) == wanted.argmax(-1)).float()
        return torch.minimum(torch.softmax(guess, -1), torch.softmax(wanted, -1)).sum(-1)

    def _said(self, module: nn.Module, batch: Batch, features: torch.Tensor, anchors: torch.Tensor) -> Blocks:
        tokens, size = F.pad(batch.tokens.flatten(), (0, self.depth)), self.depth
        behind = tokens[anchors[:, None] + torch.arange(size, device=anchors.device)]
        block = behind.clone()
        block[:, 1:] = self.head.config.mask_token
        said: Blocks = module(features, self.embedded(block), behind, batch.positions, batch.documents, anchors)
        return said

    def _guessed(self, said: Blocks, there: torch.Tensor) -> torch.Tensor:
        """[N, d] logits of the blocks' rows that are ``there`` [A, block]."""
        logits = self.logits(said.hidden[there])
        return logits if said.bias is None else logits + said.bias[there].to(logits.dtype)

    def chains(self, text: Written) -> list[list[bool]]:
        logits, _ = self.guesses(text)
        size = len(text.tokens) - text.prompt
        new = torch.tensor(text.tokens[text.prompt :], device=logits.device)
        wanted = F.pad(new, (0, self.depth), value=-1).unfold(0, self.depth, 1)[:size].contiguous()
        right = logits.argmax(-1) == number_in(self.head.draft_tokens, wanted)
        return [chain[: size - first] for first, chain in enumerate(right.tolist())]

    @torch.no_grad()
    def guesses(self, text: Written) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, B, d] and chances of acceptance [N, B], for blocks behind the prompt's last token and behind each
        of the N new tokens except the last, with the text's own tokens before each guess.
        """
        batch = self.batch_of(text, 0, 1)
        features, _ = self.read(batch)
        anchors = torch.arange(text.prompt - 1, len(text.tokens) - 1, device=features.device)
        said = self._said(self.head, batch, features, anchors)
        every = torch.ones(said.hidden.shape[:2], dtype=torch.bool, device=features.device)
        return self._guessed(said, every).unflatten(0, every.shape), said.acceptance.sigmoid()

    def card(self) -> CardText:
        own, size, matrix = self.head.config, *self.card_words()
        return CardText(
            title="DSpark head",
            about=f"a DSpark head of {size}, blocks of {self.depth} tokens, over hidden layers {own.taps}",
            opening=f"A DSpark head for `{own.target}` over its hidden layers {own.taps}: {own.layers} layers, blocks "
            f"of {self.depth} tokens, {size}, {matrix} on top{among(own.draft_vocab)}. The target stays as it was.",
            columns=self.columns(),
            note="Chains of a block's likeliest tokens. Tokens per step count the bonus token.",
        )


def anchors_of(batch: Batch, most: int, depth: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The places where blocks begin, and what their rows must guess; seed, step and windows decide the places.

    Returns:
        [A] rows of the flattened tokens, ascending, at most ``most`` in a window; and [A, depth] int64, for each token
        of a block its guess's index in ``batch.targets``, -1 where that place, or one before it in the block, is not
        trained.
    """
    targets, (windows, length) = batch.targets, batch.documents.shape
    numbers = [] if batch.numbers is None else batch.numbers.tolist()
    draw = np.random.default_rng([seed, batch.step, *numbers])
    chosen = []
    for window in (targets // length == number for number in range(windows)):
        own = window.nonzero()[:, 0].cpu().numpy()
        chosen.append(np.sort(draw.permutation(own)[:most]))
    anchors = targets[torch.from_numpy(np.concatenate(chosen)).to(targets.device)]
    index = torch.full((windows * length + depth,), -1, device=targets.device)
    index[targets] = torch.arange(len(targets), device=targets.device)
    rows = anchors[:, None] + torch.arange(depth, device=targets.device)
    pieces = F.pad(batch.documents.flatten(), (0, depth), value=-1)
    there = (index[rows] >= 0) & (pieces[rows] == pieces[anchors][:, None]) & (rows // length == rows[:, :1] // length)
    return anchors, torch.where(there.cumprod(1).bool(), index[rows], -1)


def new_head(config: NewHead, target: Target, *, counts: torch.Tensor | None = None, seed: int = 0) -> TrainedBlock:
    """An untrained head for a target; ``counts`` [V] of the data's tokens decide its draft vocabulary.

    Raises:
        ConfigError: the target lacks a layer or the mask token.
    """
    layers = target.num_layers
    taps = config.taps or sorted({min(2, layers), (layers + 1) // 2, max(layers - 2, 1)})
    sizes = target_sizes(target, taps, heads=config.heads, intermediate_size=config.intermediate_size, least=1)
    mask = config.mask_token
    if mask is None:
        mask = 0 if counts is None else int(counts.flip(0).argmin())
        mask = mask if counts is None else len(counts) - 1 - mask
    if not 0 <= mask < target.vocab_size:
        raise ConfigError(f"head.mask_token is {mask}; it must be a token, in [0, {target.vocab_size})")
    rank = config.markov_rank
    head = TrainedBlock(
        BlockConfig(
            kind="dspark",
            layers=config.layers,
            block_size=config.block_size,
            mask_token=mask,
            from_anchor=True,
            qk_norm=True,
            draft_vocab=config.draft_vocab,
            own_head=config.own_head,
            markov="vanilla" if rank else "none",
            markov_rank=rank,
            confidence="markov" if rank else "hidden",
            **sizes,
        )
    )
    begun(head, target, counts, seed)
    with torch.no_grad():
        if rank:
            head.markov_head.markov_w2.weight.zero_()
        head.confidence_head.proj.weight.zero_()
        head.confidence_head.proj.bias.zero_()
    return head


def run(config: Config, *, dry_run: bool = False) -> dict[str, float]:
    """Train a head; see :func:`training.run.run_training`."""

    def make(config: Config, target: Target, counts: torch.Tensor) -> TrainedBlock:
        if config.start is not None:
            head: TrainedBlock = started_head(TrainedBlock, config.start, "dflash", "dspark", target)
            return head
        return new_head(config.head, target, counts=counts, seed=config.loop.seed)

    return run_training(config, "dflash.head", make, DSparkTraining, dry_run=dry_run)
