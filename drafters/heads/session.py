"""The common part of drafters with a head: loading it, waiting hidden states, and the head's own cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from drafters.heads.growing import GrowingSession
from drafters.heads.loading import describe, load_head
from drafters.heads.native_growth import Grown, NativeGrowth
from drafters.heads.weights import HeadWeights
from drafters.shared.own_cache import OwnCache
from drafters.shared.vocabulary import DraftVocabulary
from drafters.shared.weights import weights_folder
from specdec.drafter import Context, DrafterBase, Observation
from specdec.step import device_copies
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.tree import Draft, Hints
from specdec.target import FINAL, Target

__all__ = ["CHUNK", "HeadDrafter", "HeadSession"]

CHUNK = 512
"""Rows of text that a head runs at a time."""


class HeadDrafter(DrafterBase):
    """A drafter with a trained head, or with the model's own layers that read its last hidden state (``head`` None).

    Attributes:
        config: the options; ``head``, ``check_target``, ``rows``, ``branch`` and ``min_chance`` are read.
        vocabulary: the draft vocabulary.
        layers: hidden states of the target, as numbers of layers, in the order in which the head reads them.
        depth: most tokens of a path.
        at_once: whether one pass gives all depths.
        trained: what ``specdec train`` calls such a head.
    """

    draws = False
    needs_draft = False
    at_once = False
    trained: ClassVar[str]
    depth: int

    def __init__(self, config: Any, head: HeadWeights | None, target: Target) -> None:
        super().__init__(config)
        self.vocabulary = DraftVocabulary(None if head is None else head.draft_tokens, target)
        self.layers: Sequence[int] = [FINAL] if head is None else head.config.taps
        self.taps = frozenset(self.layers)

    @classmethod
    def build(cls, config: Any, target: Target) -> HeadDrafter:
        """Load the head for a target.

        Raises:
            CheckpointError: there is no head, or a broken one, or one of another model.
        """
        source = (
            f"Train one with `specdec train {cls.trained} --model ...`, or download one that was trained for it "
            f"(docs/heads.md says which formats are read; `specdec convert {cls.name}` writes any of them anew)"
        )
        folder = weights_folder(config.head, target, f"{cls.name}.head", source=source)
        head = load_head(folder, cls.name, target, check_target=config.check_target)
        return cls(config, head.to(target.head_device, target.dtype), target)

    @classmethod
    def describe_weights(cls, folder: Path) -> list[str]:
        """The lines of ``specdec drafters --check`` about a folder.

        Raises:
            CheckpointError: the folder has no head of this drafter.
        """
        return describe(folder, cls.name)


class HeadSession(GrowingSession):
    """One sequence's hidden states, the head's own cache, and the record of its guesses.

    The head's cache can hold row i once the hidden state of position i is known, which is when the engine has committed
    that position. Hidden states wait until the head's next pass; those of a prompt's chunks are run at once.

    Args:
        context: the sequence's context.
        drafter: see :class:`HeadDrafter`.
        specs: cache layout of the head's layers.
        weights: number of weights that a pass reads, for its price.
        rows: most rows of a pass behind the text.
    """

    def __init__(
        self,
        context: Context,
        drafter: HeadDrafter,
        specs: Sequence[LayerSpec],
        weights: int,
        rows: int,
    ) -> None:
        super().__init__(
            context,
            drafter.vocabulary,
            drafter.config,
            depth=drafter.depth,
            weights=weights,
            at_once=drafter.at_once,
        )
        self._taps = drafter.layers
        text = context.prompt_length + context.remaining
        self._device = specs[0].device
        cache = KVCache(specs, capacity=text, rows=max(rows, min(CHUNK, text)))
        self._own = OwnCache(cache)
        self._growth: NativeGrowth | None = None
        self._missing = 0  # tokens of the text that the head's cache will never have

    def missed(self) -> None:  # the head goes on without the text that its cache lacks
        self._own.miss()
        self._grown = None
        self._missing = self._context.cache.length - self._own.cache.length

    def _ready(self) -> bool:
        self._own.begin()
        return self._waiting > 0

    def observe(self, seen: Observation) -> None:
        # Rows behind the root were computed from the head's own states. Its next pass reads the target's states.
        self._own.commit(seen, [] if self._grown is None else self._grown.tokens, most=1)
        self._learn(seen)
        self._defer([seen.taps[layer] for layer in self._taps], None if seen.draft is None else seen.path)
        prompt = len(self._context.tokens) == self._context.prompt_length
        if (prompt and seen.draft is None) or self._waiting > CHUNK // 2:
            self._catch_up()

    def _defer(self, taps: Sequence[torch.Tensor], rows: Sequence[int] | None) -> None:
        """Have ``rows`` (None: all) of the target's hidden states [T, D], one for each tap, wait for the next pass."""
        parts = taps if rows is None else [device_copies.pick(tap, rows) for tap in taps]
        parts = [part.to(self._device) for part in parts]  # layers of a target can be on several devices
        self._own.defer(parts[0] if len(parts) == 1 else torch.cat(parts, -1))

    def _absorb(self, features: torch.Tensor) -> None:
        """Run the head for the next rows of text, without logits."""
        raise NotImplementedError

    def _tokens_of(self, features: torch.Tensor) -> list[int]:
        """The tokens that belong to the next hidden states; each stands one position behind its state."""
        first = self._next + 1
        return self._context.tokens[first : first + len(features)]

    @property
    def _waiting(self) -> int:
        """The number of rows that wait; valid between two steps."""
        return self._context.cache.length - self._next

    @property
    def _next(self) -> int:
        """The position of the next row of the head's cache; valid between two steps."""
        return self._own.cache.length + self._missing

    def _catch_up(self) -> None:
        """Run the head for all waiting rows but the last, which runs with the next draft."""
        waiting, most = self._own.catch_up(), self._own.cache.rows
        last = len(waiting) - 1
        for first in range(0, last, most):
            self._absorb(waiting[first : min(first + most, last)])
        self._own.defer(waiting[last:].clone())  # a view would keep all rows in memory

    def _growing(self, text: Sequence[int], features: array[int] | None, most: int, deepest: int) -> NativeGrowth:
        """What the native library grows this draft from, see :meth:`NativeGrowth.begin`."""
        growth = self._growth = self._growth or self._new_growth()
        growth.begin(
            text,
            features,
            most=most,
            deepest=deepest,
            position=self._place(0),
            sure=self._sure,
            accepted=self._accepted,
            guesses=self._guesses,
        )
        return growth

    def _new_growth(self) -> NativeGrowth:
        prices, length, temperature = self._prices, self._length, self._temperature
        most = max(self._most, 1)
        return NativeGrowth(
            self._own.cache,
            deepest=self._deepest,
            most=most,
            branch=self._branch,
            width=self._width,
            prices=prices.of_rows(length, most),
            level_price=prices.rate * (prices.added(length, 1) + self._level_price),
            least=self._least,
            noise=self._noise,
            temperature=temperature,
            divisor=temperature if self._processors else 0.0,
        )

    def _draft_of(self, grown: Grown, passes: int) -> Draft:
        """The draft that the library has grown from ``passes`` of the head."""
        self._grown, self._passes = grown, passes
        tokens, parents, chances = grown.draft
        return Draft(tokens, parents, hints=Hints(chances=chances, cost=self._cost))
