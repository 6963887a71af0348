"""Prefix cache: keys and values of the latest text, for a next text with the same beginning, as in a conversation.

Texts are compared by token ids. Keys and values of the common beginning are copied, slot by slot, into the new text's
own cache. So nothing is computed twice, a text's cache is never cut, and several texts may go on from one.

A sliding window's ring holds only the last keys. If it lacks a key that the new text's next token sees, the whole new
text is run. The same holds if the model was changed or replaced. Hidden states are kept for drafters that read them, up
to where drafting rested. A drafter whose sessions can do without the others goes on from all keys and values; any other
has the target run what lacks hidden states.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from specdec.settings.copies import NotCopied
from specdec.step.cache import KVCache
from specdec.target import Target

__all__ = ["KeptText", "PrefixCache", "alike"]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KeptText:
    """A text that is being decoded or was, as far as it went.

    Attributes:
        target, version: the model, and its ``version`` when the text was begun.
        cache: its keys and values.
        tokens: prompt and emitted tokens, live; the last ones may not be cached.
        taps: layer -> pieces [n, D] of the hidden states of its cached tokens, for drafters that want them.
        known: layer -> how many of these tokens, from the first one on.
        forgoes: whether its drafting session can do without hidden states of the tokens that it copies.
        salt: texts of one salt share beginnings with each other only.
    """

    target: Target
    version: object
    cache: KVCache
    tokens: Sequence[int]
    taps: dict[int, list[torch.Tensor]]
    known: dict[int, int] = field(default_factory=dict)
    forgoes: bool = False
    salt: str = ""

    def begin(self, hidden: Mapping[int, torch.Tensor]) -> None:
        """Have the hidden states [n, D] of the first tokens, which were copied."""
        for layer, rows in hidden.items():
            self.taps[layer].append(rows)
            self.known[layer] = len(rows)

    def keep(self, taps: Mapping[int, torch.Tensor], path: Sequence[int]) -> None:
        """Add the hidden states of the rows that were just committed.

        Nothing is added to a layer that lacks tokens before them, as after a rest or an interrupt.
        """
        end = self.cache.length
        for layer, rows in taps.items():
            if layer in self.taps and self.known.get(layer, 0) == end - len(path):
                self.taps[layer].append(rows[list(path)])
                self.known[layer] = end

    def shared(self, other: KeptText) -> int:
        """How many tokens of this one a text that begins now may copy and go on from; its last is the root."""
        if self.target is not other.target or self.version != other.version or self.salt != other.salt:
            return 0
        # A text that was interrupted in the middle of a step may have committed more than it noted, or less.
        known = self.cache.length if other.forgoes else min(self.cache.length, self._seen(other.taps))
        most = min(alike(self.tokens, other.tokens), len(other.tokens) - 1, known)
        return other.cache.points(self.cache, most)

    def take(self, texts: Iterable[KeptText], least: int = 0) -> dict[int, torch.Tensor] | None:
        """Fill its empty cache with the beginning that it shares with one of these texts, the longest that there is.

        Returns:
            The hidden states [n, D] of the first n of these tokens, those of which all its layers' are known; None
            where no text shares more than ``least`` tokens.
        """
        for count, other in sorted([(one.shared(self), one) for one in texts], key=itemgetter(0), reverse=True):
            if count <= least:
                break
            if self.cache.take(other.cache, count):
                known = min(count, other._seen(self.taps))
                return {layer: torch.cat(other.taps[layer])[:known].clone() for layer in self.taps if known}
        return None

    def _seen(self, layers: Collection[int]) -> int:
        """How many tokens all these layers' hidden states are known of, from the first one on."""
        return min([self.known.get(layer, 0) for layer in layers], default=sys.maxsize)


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    first, last = 0, min(len(one), len(other))
    while first < last:  # slices are compared at once, which tokens would be one by one
        half = (first + last + 1) // 2
        if one[first:half] == other[first:half]:
            first = half
        else:
            last = half - 1
    return first


class PrefixCache(NotCopied):
    """Keeps the latest text that was decoded with it: ``engine.generate(prompt, prefix_cache=kept)``.

    Generations are the same as without one: bit for bit where the target is ``batch_invariant``, so that a token's keys
    and values do not depend on the rows beside it, and elsewhere up to rounding, as between two sizes of
    ``prefill_chunk``. It holds the memory of one text's cache; nodes of a tree would hold it a second time, as a cache
    goes on moving its slots, so it is a tree's running texts with a limit of one (both call :meth:`KeptText.take`). A
    copy, as of a chat that branches, goes on from the same text, and keeps its own later ones; it takes no memory until
    then. It cannot be pickled.
    """

    instead = "make a new one, PrefixCache(), where it is used: the first text with it runs whole"

    def __init__(self) -> None:
        self._kept: KeptText | None = None

    def clear(self) -> None:
        """Forget the text, as after an edit of the model that no weight shows: a hook, a number, another adapter."""
        self._kept = None

    def __copy__(self) -> PrefixCache:
        branch = type(self)()
        branch._kept = self._kept  # only read from now on
        return branch

    def __deepcopy__(self, memo: Any) -> PrefixCache:
        return self.__copy__()

    def begin(
        self,
        target: Target,
        cache: KVCache,
        tokens: Sequence[int],
        taps: Collection[int],
        *,
        forgoes: bool = False,
        salt: str = "",
    ) -> tuple[KeptText, dict[int, torch.Tensor]]:
        """Fill a new text's empty cache with the known part of its beginning, and keep the new text from now on.

        Args:
            target, cache, tokens: of the new text.
            taps: the layers whose hidden states are wanted.
            forgoes: whether tokens are copied, too, whose hidden states are not known.
            salt: see :class:`KeptText`.

        Returns:
            The kept text, and the hidden states that are known of the copied tokens: layer -> [n, D], of the first n.
        """
        none: dict[int, list[torch.Tensor]] = {layer: [] for layer in taps}
        text = KeptText(target, target.version(), cache, tokens, none, forgoes=forgoes, salt=salt)
        text.begin(hidden := self._taken(text))
        return text, hidden

    def _taken(self, text: KeptText) -> dict[int, torch.Tensor]:
        """Fill a text's empty cache with what is known of its beginning, and keep the text; the hidden states."""
        former, self._kept = self._kept, text
        return text.take([former] if former is not None else []) or {}

    def keep(self, text: KeptText) -> None:
        """Have a text that goes on no more; the latest one is kept from its beginning on."""
