"""Prefix cache: keys and values of the latest text, for a next text with the same beginning, as in a conversation.

Texts are compared by token ids. Keys and values of the common beginning are copied, slot by slot, into the new text's
own cache. So nothing is computed twice, a text's cache is never cut, and several texts may go on from one.

A sliding window's ring holds only the last keys. If it lacks a key that the new text's next token sees, the whole new
text is run. The same holds if the model was changed or replaced, or if a drafter needs hidden states that were not
kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.settings.copies import NotCopied
from specdec.step.cache import KVCache
from specdec.target import Target

__all__ = ["KeptText", "PrefixCache", "alike"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptText:
    """A text that is being decoded or was, as far as it went.

    Attributes:
        target, version: the model, and its ``version`` when the text was begun.
        cache: its keys and values.
        tokens: prompt and emitted tokens, live; the last ones may not be cached.
        taps: layer -> pieces [n, D] of the hidden states of its cached tokens, for drafters that want them.
        known: layer -> how many of these tokens, from the first one on.
    """

    target: Target
    version: object
    cache: KVCache
    tokens: Sequence[int]
    taps: dict[int, list[torch.Tensor]]
    known: dict[int, int] = field(default_factory=dict)

    def keep(self, taps: Mapping[int, torch.Tensor], path: Sequence[int]) -> None:
        """Add the hidden states of the rows that were just committed.

        A layer that did not run for them is kept no more, nor is one that lacks tokens before them, as after an
        interrupt.
        """
        end = self.cache.length
        for layer in tuple(self.taps):
            if layer in taps and self.known.get(layer, 0) == end - len(path):
                self.taps[layer].append(taps[layer][list(path)])
                self.known[layer] = end
            else:
                del self.taps[layer]
                self.known.pop(layer, None)

    def shared(self, other: KeptText) -> int:
        """How many tokens a text that begins now has in common with this one, and may copy; its last is the root."""
        if self.target is not other.target or self.version != other.version:
            return 0
        # A text that was interrupted in the middle of a step may have committed more than it noted, or less.
        known = [self.cache.length, *(self.known.get(layer, 0) for layer in other.taps)]
        return min(alike(self.tokens, other.tokens), len(other.tokens) - 1, *known)

    def end(self) -> None:
        """Be told that the text goes on no more."""


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

    Generations are the same as without one: bit for bit in native layers, where a token's keys and values do not
    depend on the rows beside it, and elsewhere up to rounding, as between two sizes of ``prefill_chunk``. It holds the
    memory of one text's cache. A copy, as of a chat that branches, goes on from the same text, and keeps its own later
    ones; it takes no memory until then. It cannot be pickled.
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
        self, target: Target, cache: KVCache, tokens: Sequence[int], taps: Collection[int]
    ) -> tuple[KeptText, dict[int, torch.Tensor]]:
        """Fill a new text's empty cache with the known part of its beginning, and keep the new text from now on.

        Returns:
            The kept text, and the hidden states of the copied tokens: layer -> [n, D].
        """
        text = KeptText(target, target.version(), cache, tokens, {layer: [] for layer in taps})
        former, self._kept = self._kept, text
        count = 0 if former is None else former.shared(text)
        if former is None or not count or not cache.take(former.cache, count):
            return text, {}
        hidden = {layer: torch.cat(former.taps[layer])[:count] for layer in taps}
        text.keep(hidden, range(count))
        return text, hidden
