"""Packing: samples are laid end to end into windows of one length, so only the very last window has padding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from training.split import Sample

__all__ = ["Batch", "Windows", "pack"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B windows of L tokens.

    Attributes:
        tokens: [B, L] int64.
        targets: [N] int64, rows of the flattened [B * L] whose *next* token is trained, ascending.
        positions: [B, L] int64, each token's position in its piece of text.
        documents: [B, L] int64, number of each token's piece; tokens see only their own piece.
        numbers: [B] int64, the windows' indices in their data set; None for other texts.
        step: step of the training run, for random choices that differ each time that a window is used.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    numbers: torch.Tensor | None = None
    step: int = 0

    @property
    def mask(self) -> torch.Tensor | None:
        """[B, 1, L, L] bool, True where a token sees another; None where every window is one piece, so causal."""
        if not bool((self.documents != self.documents[:, :1]).any()):
            return None
        same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
        return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()

    def to(self, device: torch.device) -> Batch:
        moved = (t.to(device) for t in (self.tokens, self.targets, self.positions, self.documents))
        return Batch(*moved, numbers=self.numbers, step=self.step)


class Windows:
    """All windows of a data set, in memory: 7 bytes a token.

    ``at`` makes a batch of given windows, so the caller's numbers alone decide the order of training.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], trained: npt.NDArray[np.bool_], starts: npt.NDArray[np.bool_]):
        self._tokens, self._trained, self._starts = tokens, trained, starts  # [N, L] each

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def length(self) -> int:
        """L, the number of tokens of a window."""
        return int(self._tokens.shape[1])

    @property
    def trained(self) -> int:
        """The number of trained tokens in all windows."""
        return int(self._trained.sum())

    @property
    def digest(self) -> str:
        """A hash of tokens and masks; equal data, packed alike, have equal hashes."""
        hashed = hashlib.sha256(self._tokens.tobytes())
        hashed.update(np.packbits(self._trained).tobytes())
        return hashed.hexdigest()[:16]

    @property
    def longest(self) -> int:
        """The most trained tokens in a row that have a token before them in their piece of text."""
        longest, run = 0, np.zeros(len(self), dtype=np.int64)
        for learnt, starts in zip(self._trained.T[1:], self._starts.T[1:], strict=True):
            run = np.where(learnt & ~starts, run + 1, 0)
            longest = max(longest, int(run.max(initial=0)))
        return longest

    def at(self, rows: npt.NDArray[np.int64], step: int = 0) -> Batch:
        """The batch of these windows, for a step of a run."""
        starts = self._starts[rows]
        documents = np.cumsum(starts, 1)
        places = np.arange(self.length)
        begins = np.maximum.accumulate(np.where(starts, places, 0), 1)
        # Position i predicts token i + 1, if that is trained and in the same piece.
        follows = np.zeros(starts.shape, dtype=bool)
        follows[:, :-1] = self._trained[rows][:, 1:] & ~starts[:, 1:]
        return Batch(
            torch.from_numpy(self._tokens[rows].astype(np.int64)),
            torch.from_numpy(np.flatnonzero(follows)),
            torch.from_numpy(places - begins),
            torch.from_numpy(documents),
            torch.from_numpy(rows),
            step,
        )


def pack(samples: Iterable[Sample], length: int, *, pad: int = 0) -> Windows:
    """Lay samples end to end; where a window's edge cuts a sample, the rest is a piece of its own.

    The last window is padded with ``pad``, untrained. Windows without trained tokens are left out.

    Example: samples of 3 and 4 tokens with length 5 become a a a b b | b b . . .
    """
    tokens: list[int] = []
    trained: list[bool] = []
    starts: list[bool] = []
    for sample in samples:
        tokens += sample.tokens
        trained += sample.trained
        starts += [True, *[False] * (len(sample.tokens) - 1)] if sample.tokens else []
    fill = -len(tokens) % length
    rows = np.array(tokens + [pad] * fill, dtype=np.int32).reshape(-1, length)
    learnt = np.array(trained + [False] * fill, dtype=bool).reshape(-1, length)
    begins = np.array(starts + [True] * min(fill, 1) + [False] * max(fill - 1, 0), dtype=bool).reshape(-1, length)
    begins[:, 0] = True
    useful = learnt[:, 1:].any(1)
    return Windows(rows[useful], learnt[useful], begins[useful])
