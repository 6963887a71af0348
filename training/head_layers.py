"""A head's layers on whole texts with gradients: drafting's own layers, with attention over texts and chains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch

from drafters.heads.forward import HeadForward
from drafters.heads.spec import head_spec
from specdec.decoder.head_spec import HeadSpec
from specdec.decoder.rope import Angles, RopeTables
from specdec.runners.linear import DenseLinear

__all__ = ["Trained", "attend", "by_row"]

_tables = cache(RopeTables)


class Trained:
    """What heads in training have beside their modules."""

    @cached_property
    def spec(self) -> HeadSpec:
        """What the head computes."""
        own: Any = self
        return head_spec(own.config)

    def live(self) -> HeadForward:
        """The head by its parameters as they are now, with gradients; to be made in each forward."""
        own: Any = self
        return HeadForward.of(self.spec, dict(own.named_parameters()), _cast_once)

    def angles(self, positions: torch.Tensor, end: int, like: torch.Tensor) -> Angles:
        """Rotary positions of rows at ``positions`` [N], below ``end``, in the dtype of ``like``."""
        table = _tables(like.dtype, like.device).whole(self.spec.layers[0].attention.rope, end)
        return Angles(*(values.index_select(0, positions) for values in table))


def _cast_once(weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear:
    """A product whose weight autocast casts once for all tokens of a chain; by itself it remembers parameters alone."""
    kind = weight.device.type
    return DenseLinear(weight.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else weight, bias)


def by_row(heads: torch.Tensor) -> torch.Tensor:
    """Heads [1, H, N, d] as [N, H, d]."""
    return heads[0].transpose(0, 1)


def attend(
    queries: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor] | None,
    seen: torch.Tensor,
    counts: Sequence[int],
) -> torch.Tensor:
    """[N, Hq, d] attention of rows over their windows' texts and the rows that were drafted beside them.

    Args:
        queries: [N, Hq, d], rows of the first window first.
        text: keys and values of the windows' rows, [B, L, Hk, d] each.
        own: keys and values that each row sees beside the text, [N, S, Hk, d] each; or None.
        seen: [N, L] bool, what each row sees of its window's text.
        counts: number of rows in each window.
    """
    keys, values = text
    groups = queries.shape[1] // keys.shape[2]
    queries = queries.unflatten(1, (-1, groups)) * queries.shape[-1] ** -0.5  # [N, Hk, g, d]
    found, first = [], 0
    for window, count in enumerate(counts):
        rows = slice(first, first + count)
        first += count
        asked = queries[rows]
        scores = torch.einsum("nkgd,lkd->nkgl", asked, keys[window])
        scores = scores.masked_fill(~seen[rows, None, None], -torch.inf)
        if own is not None:
            scores = torch.cat((scores, torch.einsum("nkgd,nskd->nkgs", asked, own[0][rows])), -1)
        chances = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
        length = keys.shape[1]
        part = torch.einsum("nkgl,lkd->nkgd", chances[..., :length], values[window])
        if own is not None:
            part = part + torch.einsum("nkgs,nskd->nkgd", chances[..., length:], own[1][rows])
        found.append(part.flatten(1, 2))
    return torch.cat(found)
