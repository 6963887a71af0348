"""Training of Medusa's heads on a frozen target: Medusa-1 (Cai et al. 2024, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import nn

from drafters.medusa.heads import HeadsConfig, MedusaHeads, with_roots
from drafters.medusa.rank_paths import Node, check_tree, nodes_of, paths_of
from drafters.shared.fingerprint import fingerprint
from drafters.shared.vocabulary import most_frequent, number_in, ranks_of
from specdec.models.transformers_target import TransformersTarget
from training.acceptance import Written
from training.card import CardText, among
from training.packing import Batch
from training.run import DrafterTraining, TrainConfig, parameters_of, run_training, started

__all__ = ["Config", "MedusaTraining", "NewHeads", "ahead", "new_heads", "roots_of", "run", "started_heads"]

_RANKS, _KEPT = 3, 10  # whose accuracy is logged, and kept with the heads


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHeads:
    """The heads to train; see HeadsConfig."""

    heads: int = 3
    layers: int = 1
    sees_root: bool = True
    own_head: bool = False
    draft_vocab: int = 0


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """What a training config may hold, beside TrainConfig's.

    Attributes:
        labels: ``hard``, the text's tokens as in the paper, or ``soft``, the target's distribution for their places.
        decay: head k's loss counts ``decay ** k``, k from 1.
        tree: whose tokens per step choose the best checkpoint; a preset, a YAML file or rank paths.
        heads: what is trained, see its class; with ``start``, those are, and ``sees_root`` alone counts here.
    """

    out: str = "runs/medusa"
    labels: Literal["soft", "hard"] = "hard"
    decay: Annotated[float, Gt(0), Le(1), "a number in (0, 1]"] = 0.8
    tree: str | list[list[int]] = "small"
    heads: NewHeads = field(default_factory=NewHeads)

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        check_tree(self.paths, heads=self.heads.heads if self.start is None else None)

    @property
    def paths(self) -> list[list[int]]:
        """The rank paths that ``tree`` means."""
        return paths_of(self.tree)


class MedusaTraining(DrafterTraining):
    """Heads' training."""

    config: Config

    def __init__(
        self, heads: MedusaHeads, target: TransformersTarget, texts: Sequence[Written], config: Config
    ) -> None:
        self.heads, self._nodes = heads, nodes_of(config.paths)
        super().__init__(heads, target, texts, config)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        _, states = self.frozen.read(batch)
        with torch.no_grad():
            wanted = torch.softmax(self.frozen.head(states).float(), -1) if self.config.labels == "soft" else None
        total = states.new_zeros((), dtype=torch.float32)
        for number, guess in enumerate(module(self._brought(states.float(), batch)), 1):
            rows, places = ahead(batch, number)
            if len(rows) == 0:
                continue
            logits = self._logits(guess[rows]).float()
            text = number_in(self.heads.draft_tokens, batch.tokens.flatten()[batch.targets[places] + 1])
            label = text if wanted is None else wanted[places]
            loss = F.cross_entropy(logits, label, ignore_index=-1, reduction="sum")
            total = total + self.config.decay**number * loss
        return total

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Tokens per step with the tree; for each head, how often the text's token has rank 0, 1, ... among its own."""
        heads, steps, tokens = self.heads.config.heads, 0, 0
        ranks: list[list[int]] = [[] for _ in range(heads)]
        for text in self.texts:
            judged = self.judge(text)
            steps += len(roots_of(judged, self._nodes, text))
            tokens += len(text.tokens) - text.prompt
            for own, new in zip(ranks, judged, strict=True):
                own += [rank for rank in new if rank >= 0]
        figures = {"tokens_per_step": tokens / max(steps, 1)}
        kept = range(min(_KEPT, self.heads.config.ranks))
        accuracy = [[round(own.count(rank) / max(len(own), 1), 4) for rank in kept] for own in ranks]
        self.heads.config = replace(self.heads.config, accuracy=accuracy)
        for number, rates in enumerate(accuracy, 1):
            figures |= {f"head_{number}_rank_{rank}": rate for rank, rate in enumerate(rates[:_RANKS])}
        return figures

    def judge(self, text: Written) -> list[list[int]]:
        """For each head k and position i: the rank, for the head reading i's state, of token i + 1 + k.

        -1 before the first position that drafting reads, which is the last but one of the prompt.
        """
        size, first, ranks = len(text.tokens), max(text.prompt - 2, 0), []
        batch = self.batch_of(text, 0, size - 1)
        _, states = self.frozen.read(batch)
        like = next(self.heads.parameters())
        for number, guess in enumerate(self.heads(self._brought(states.to(like.dtype), batch)), 1):
            logits = self._logits(guess[first : size - 1 - number]).float()
            right = number_in(self.heads.draft_tokens, batch.tokens[0, first + 1 + number :][: len(logits)])
            ranks.append([-1] * first + ranks_of(logits, right).tolist())
        return ranks

    def card(self) -> CardText:
        own, size = self.heads.config, f"{parameters_of(self.heads):,} parameters"
        matrix = "each with a matrix of its own" if own.own_head else "sharing the target's own matrix"
        seeing = ", which see the root" if own.sees_root else ""
        figures = {f"head_{n}_rank_{rank}": f"{n}.{rank}" for n in range(1, own.heads + 1) for rank in range(_RANKS)}
        return CardText(
            title="Medusa heads",
            about=f"{own.heads} heads of {size} in all",
            opening=f"{own.heads} heads for `{own.target}`{seeing}, {matrix}{among(own.draft_vocab)}: {size}. The "
            "target stays as it was.",
            columns={"tokens_per_step": "tokens per step", **figures},
            note="Tokens per step, with the tree below, count the bonus token; `k.r` is how often the token k + 1 "
            "places on had rank r with head k.",
        )

    def _brought(self, states: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What the heads read: ``states`` of the batch's targets, and where they see it the token that follows each."""
        if not self.heads.config.sees_root:
            return states
        with torch.no_grad():
            return with_roots(states, self.frozen.target.embed(batch.tokens.flatten()[batch.targets + 1]))

    def _logits(self, guess: torch.Tensor) -> torch.Tensor:
        return guess if self.heads.config.own_head else self.frozen.head(guess)


def ahead(batch: Batch, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For head ``number`` (from 1): which of ``batch.targets`` have the target ``number`` places on in the same text.

    Returns two lists of indices into ``batch.targets``: the positions that a head reads, and those whose next token it
    guesses there.

    Example: targets 0 1 2 5 6 of one window, positions 5 and 6 being another text: head 1 reads 0 1 5 (indices 0 1 3)
    and guesses what follows 1 2 6 (indices 1 2 4).
    """
    targets, documents = batch.targets, batch.documents
    length = documents.shape[1]
    index = torch.full((documents.numel() + number,), -1, device=targets.device)
    index[targets] = torch.arange(len(targets), device=targets.device)
    later = index[targets + number]
    same_row = targets // length == (targets + number) // length
    piece = documents.flatten()
    same = piece[targets] == piece[(targets + number).clamp(max=documents.numel() - 1)]
    rows = torch.nonzero((later >= 0) & same_row & same)[:, 0]
    return rows, later[rows]


def roots_of(ranks: Sequence[Sequence[int]], nodes: Sequence[Node], text: Written) -> list[int]:
    """Where the engine's steps begin in a text, from ``MedusaTraining.judge``'s ranks: the positions of the roots.

    With the root at position r the heads read r - 1, and a node of depth d holds the text's token if its rank is that
    of token r + d.
    """
    root, last, roots = text.prompt - 1, len(text.tokens) - 1, list[int]()
    while root < last:
        right = {0: 0}  # row -> depth, of the rows that hold the text
        for row, node in enumerate(nodes, 1):
            fits = root >= 1 and node.depth < last - root and node.parent in right
            if fits and ranks[node.depth - 1][root - 1] == node.rank:
                right[row] = node.depth
        roots.append(root)
        root += max(right.values()) + 1
    return roots


def new_heads(config: NewHeads, target: TransformersTarget, *, counts: torch.Tensor | None = None) -> MedusaHeads:
    """Untrained heads for a target; each repeats its next token.

    ``counts`` [V] of the training data's tokens choose their draft vocabulary.
    """
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    heads = MedusaHeads(HeadsConfig(**asdict(config), **sizes, target=fingerprint(target)))
    if heads.draft_tokens is not None and counts is not None:
        heads.draft_tokens.copy_(most_frequent(counts, config.draft_vocab))
    heads.start_from(target)
    return heads


def started_heads(config: Config, target: TransformersTarget) -> MedusaHeads:
    """The heads of ``config.start``, to be trained further for a target; if they are to see the root, they learn to.

    Raises:
        ConfigError: a tree that they cannot fill; else as :func:`training.run.started`.
    """
    heads: MedusaHeads = started(MedusaHeads, str(config.start), target, "medusa")
    if config.heads.sees_root:
        heads = heads.seeing_root()
    check_tree(config.paths, heads=heads.config.heads, ranks=heads.config.ranks)
    return heads


def run(config: Config) -> dict[str, float]:
    """Train heads; see :func:`training.run.run_training`."""

    def make(target: TransformersTarget, counts: torch.Tensor) -> MedusaHeads:
        if config.start is not None:
            return started_heads(config, target)
        return new_heads(config.heads, target, counts=counts)

    return run_training(config, "medusa.heads", make, MedusaTraining)
