"""How tests have a target run a text: the one place in tests that knows what a forward is made of.

own = seam.text(target)
output = own.run(draft, taps={1})  # inside target.active()
own.commit(path)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import torch

from specdec import Draft
from specdec.runners import attention
from specdec.runners.rows import TextRows
from specdec.runners.sent_rows import SentRows, SentText, rows_on
from specdec.step.cache import KVCache
from specdec.step.joining import joined
from specdec.step.step_io import ALL, WHOLE, Entering, LayerPlan, StepInput, Wanted
from specdec.step.step_output import StepOutput

__all__ = ["Text", "asked", "beside", "in_parts", "run_together", "text"]


def in_parts(when: bool = True) -> AbstractContextManager[Any]:
    """While it lasts, attention of two rows and more goes in parts on a CPU, as else of long texts; or never does."""
    return mock.patch.object(attention, "SPLIT_FROM", 0 if when else 1 << 60)


class Text:
    """What a target, or layers that have a cache of their own, hold of one text's committed tokens.

    Args:
        of: the target that runs the text, if any.
    """

    def __init__(self, cache: KVCache, of: Any = None) -> None:
        self._cache, self._target = cache, of

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        length: int = self._cache.length
        return length

    @property
    def grown(self) -> int:
        """How often room for more tokens was taken."""
        grown: int = self._cache.grown
        return grown

    def rows(
        self,
        tokens: Draft | Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        first: int = 0,
        again: bool = True,
        plan: LayerPlan = WHOLE,
        wanted: Wanted = ALL,
        entry: Entering | None = None,
    ) -> StepInput:
        """The rows of a forward, see :meth:`run`."""
        if isinstance(tokens, Draft):
            draft, parents = tokens, None if tokens.is_chain else tokens.parents
            tokens = draft.tokens if draft.on_device is None else draft.on_device
        depths = list[int]()
        for parent in parents or ():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        tree = None if parents is None else (parents, depths)
        options: dict[str, Any] = {"plan": plan, "wanted": wanted, "entering": entry, "again": again}
        return StepInput.of(self._cache, tokens, tree, first=first, **options)

    def part(self, tokens: Draft | Sequence[int], parents: Sequence[int] | None = None, **options: Any) -> TextRows:
        """The rows as layers in torch read them; ``options``: as of :meth:`rows`."""
        backend, device = options.pop("backend", "auto"), options.pop("device", None)
        return rows_on(device, self.rows(tokens, parents, **options), backend).parts[0]

    def sent(self, tokens: Draft | Sequence[int], parents: Sequence[int] | None = None, **options: Any) -> SentText:
        """The rows as kernels read them, here on the host."""
        return SentRows(self.rows(tokens, parents, **options)).parts[0]

    def run(
        self,
        tokens: Draft | Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        first: int = 0,
        again: bool = True,
        **options: Any,
    ) -> StepOutput:
        """One forward of rows ``first`` and up of a tree: a whole draft, or tokens.

        Args:
            tokens: a draft, or the rows' tokens.
            parents: of the tree up to the last of these rows; without them it is a chain.
            first: the first row that is run; the ones above it were run before.
            again: whether a recorded graph may be used and made.
            options: what is asked of the forward: ``taps``, ``rows``, ``top_k``, ``exit_layer`` and ``entry``.
        """
        step = self.rows(tokens, parents, first=first, again=again, **asked(**options))
        output: StepOutput = self._target.forward(step)
        return output

    def commit(self, path: Sequence[int]) -> None:
        """Keep these rows of the last tree, and forget the others."""
        self._cache.commit(path)

    def fill(self, tokens: Sequence[int], chunk: int, *, again: bool = True) -> Text:
        """Commit tokens in pieces of at most ``chunk``, without logits; returns the text."""
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            self.run(piece, again=again, rows=())
            self.commit(range(len(piece)))
        return self

    def blank(self, length: int) -> Text:
        """As if ``length`` tokens were committed whose keys and values are zeros, with all room taken; the text."""
        self._cache.length = length
        self._cache.reserve(self._cache.capacity)
        for group in self._cache.groups:
            group.keys.zero_()
            group.values.zero_()
        return self

    def next_logits(self, token: int) -> torch.Tensor:
        """[V] behind one more token, which is not committed."""
        logits = self.run([token]).logits
        assert logits is not None
        return logits[0]

    def stored(self, rows: int = 0) -> list[torch.Tensor]:
        """[1, heads, n, width] keys of the committed tokens and ``rows`` more, layer by layer; then their values."""
        count = self.length + rows
        return [part[:, :, :count] for part in (*self._cache.keys, *self._cache.values)]

    def keys(self, count: int) -> list[torch.Tensor]:
        """[layers, 1, heads, n, width] keys of the first ``count`` slots of each group of layers, or of all it has."""
        return [group.keys[:, :, :, : min(count, group.size)] for group in self._cache.groups]


def text(target: Any, *, capacity: int = 64, rows: int = 32) -> Text:
    """An empty text of up to ``capacity`` tokens, whose forwards have up to ``rows`` rows."""
    return Text(target.new_cache(capacity=capacity, rows=rows), target)


def beside(specs: Sequence[Any], *, capacity: int = 64, rows: int = 32) -> Text:
    """The same of layers with a cache of their own, such as a head's: of a drafter's step, or of a runner."""
    return Text(KVCache(specs, capacity=capacity, rows=rows))


def run_together(texts: Sequence[Text], drafts: Sequence[Draft], *, again: bool = True, **options: Any) -> StepOutput:
    """One forward of a draft of each text; their rows lie one after the other."""
    more = asked(**options)
    pairs = zip(texts, drafts, strict=True)
    output: StepOutput = texts[0]._target.forward(joined([own.rows(one, again=again, **more) for own, one in pairs]))
    return output


def asked(
    *,
    taps: Collection[int] = (),
    rows: Sequence[int] | None = None,
    top_k: int = 1,
    exit_layer: int | None = None,
    entry: Entering | None = None,
) -> dict[str, Any]:
    """Options of a forward, as :meth:`Text.rows` takes them."""
    logits = None if rows is None else np.array(rows, dtype=np.int64)
    return {"plan": LayerPlan(exit_layer), "wanted": Wanted(logits, top_k, taps), "entry": entry}
