"""Training Medusa's heads on a frozen target: Medusa-1 (Cai et al. 2024, section 2.2.1)."""

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
from specdec.target import Target
from training.acceptance import Written
from training.card import CardText, among
from training.packing import Batch
from training.run import DrafterTraining, TrainConfig, parameters_of, run_training, started

__all__ = ["Config", "MedusaTraining", "NewHeads", "ahead", "new_heads", "roots_of", "run", "started_heads"]

_RANKS, _KEPT = 3, 10  # ranks whose accuracy is logged, and ranks stored with the heads


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
    """The options of the heads' training, beside those of TrainConfig.

    Attributes:
        labels: ``hard`` for the text's tokens, as in the paper, or ``soft`` for the target's distributions.
        decay: weight ``decay ** k`` of head k's loss, counted from 1.
        tree: the tree whose tokens per step choose the best checkpoint: a preset, a YAML file or rank paths.
        heads: the new heads, see their class; with ``start``, which trains existing ones, only ``sees_root`` is used.
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
        """The rank paths of ``tree``."""
        return paths_of(self.tree)


class MedusaTraining(DrafterTraining):
    """The training of Medusa's heads."""

    config: Config
    least = 2

    def __init__(self, heads: MedusaHeads, target: Target, texts: Sequence[Written], config: Config) -> None:
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
        """Tokens per step with the tree; for each head, how often its guess of rank 0, 1, ... is the text's token."""
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
        """For each head k and position i: the rank of token i + 1 + k in the head's guesses from state i.

        The rank is -1 before the first position that drafting reads, the last but one of the prompt.
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
        """The heads' inputs: ``states`` of the batch's targets and, if they see the root, next tokens' embeddings."""
        if not self.heads.config.sees_root:
            return states
        with torch.no_grad():
            return with_roots(states, self.frozen.target.embed(batch.tokens.flatten()[batch.targets + 1]))

    def _logits(self, guess: torch.Tensor) -> torch.Tensor:
        return guess if self.heads.config.own_head else self.frozen.head(guess)


def ahead(batch: Batch, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For head ``number`` (from 1): the targets with another target ``number`` places further in the same text.

    Returns two lists of indices in ``batch.targets``: the positions that the head reads, and the positions whose next
    token it guesses there.

    Example: targets 0 1 2 5 6 of one window, where 5 and 6 are another text. Head 1 reads 0 1 5 (indices 0 1 3) and
    guesses the tokens behind 1 2 6 (indices 1 2 4).
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
    """The positions of the roots of the engine's steps in a text, from the ranks of ``MedusaTraining.judge``.

    With the root at position r, the heads read state r - 1. A node of depth d has the text's token if the node's rank
    is that of token r + d.
    """
    root, last, roots = text.prompt - 1, len(text.tokens) - 1, list[int]()
    while root < last:
        right = {0: 0}  # row -> depth, for rows with the text's tokens
        for row, node in enumerate(nodes, 1):
            fits = root >= 1 and node.depth < last - root and node.parent in right
            if fits and ranks[node.depth - 1][root - 1] == node.rank:
                right[row] = node.depth
        roots.append(root)
        root += max(right.values()) + 1
    return roots


def new_heads(config: NewHeads, target: Target, *, counts: torch.Tensor | None = None) -> MedusaHeads:
    """Untrained heads for a target; each repeats the target's next token.

    ``counts`` [V] of the data's tokens decide their draft vocabulary.
    """
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    heads = MedusaHeads(HeadsConfig(**asdict(config), **sizes, target=fingerprint(target)))
    if heads.draft_tokens is not None and counts is not None:
        heads.draft_tokens.copy_(most_frequent(counts, config.draft_vocab))
    heads.start_from(target)
    return heads


def started_heads(config: Config, target: Target) -> MedusaHeads:
    """The heads of ``config.start``, to train further for a target; with ``sees_root`` they learn to use the root.

    Raises:
        ConfigError: they cannot fill the tree; for other errors see :func:`training.run.started`.
    """
    heads: MedusaHeads = started(MedusaHeads, str(config.start), target, "medusa")
    if config.heads.sees_root:
        heads = heads.seeing_root()
    check_tree(config.paths, heads=heads.config.heads, ranks=heads.config.ranks)
    return heads


def run(config: Config, *, dry_run: bool = False) -> dict[str, float]:
    """Train heads; see :func:`training.run.run_training`."""

    def make(config: Config, target: Target, counts: torch.Tensor) -> MedusaHeads:
        if config.start is not None:
            return started_heads(config, target)
        return new_heads(config.heads, target, counts=counts)

    return run_training(config, "medusa.heads", make, MedusaTraining, dry_run=dry_run)
