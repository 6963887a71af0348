"""SentRows: a forward's rows on a device with its own memory, to which all that it needs goes by one copy.

The copy is made when something there is first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from specdec.runners.packed_step import MOST_REPLAYED, Arrays, PackedText, Padding, grouped, padding_of, stacked
from specdec.runners.rows import Rows, TextRows
from specdec.runners.visibility import bucket
from specdec.step import device_copies
from specdec.step.step_io import StepInput

__all__ = ["Group", "SentRows", "SentText", "last_row", "rows_on"]

_MOST_ROWS = 256  # in a graph of several sequences; more are launched kernel by kernel


class Group(NamedTuple):
    """Sequences of a batch with about as many rows each, whose keys are stored and read by one launch for all of them.

    Attributes:
        arrays: those of kernels, with one more dimension: G sequences, each with K rows, the most that one of them has.
            Chains have neither ``draws`` nor ``closure``.
        rows: int64 [G x K], which of the batch's rows is at each place; any at a place that is padding.
        windows: window of each layer's attention.
    """

    arrays: dict[str, torch.Tensor]
    rows: torch.Tensor
    windows: Sequence[int | None]

    def where(self) -> dict[str, torch.Tensor]:
        """As of a sequence."""
        return self.arrays


class Sent:
    """What was copied to the device for several sequences.

    Attributes:
        views: the arrays. Those that only one sequence has are under its number and their name.
        stacked: the arrays that kernels read of all sequences, on the host; empty where each has its own.
    """

    def __init__(self, views: device_copies.Views, stacked: Arrays) -> None:
        self.views, self.stacked = views, stacked

    @cached_property
    def step(self) -> dict[str, torch.Tensor]:
        """The latter on the device."""
        return device_copies.views(self.views["step"], self.stacked)

    def of(self, part: SentText) -> device_copies.Views:
        """One sequence's own arrays there."""
        views, own, places = self.views, Arrays(), dict[str, int]()
        arrays = part.arrays if self.stacked else {"step": device_copies.packed(part.shapes), **part.arrays}
        for name, array in arrays.items():
            numbered = f"{part.number} {name}"
            if numbered in views.places:
                own[name], places[name] = array, views.places[numbered]
            elif name in views.places:  # its part of one array for all rows
                own[name], places[name] = array, views.places[name] + array.itemsize * part.begins
        return device_copies.Views(views.buffer, own, places)


class SentText(PackedText):
    """One sequence's rows there.

    Attributes:
        among: what was copied for several sequences, these among them; None where these are copied by themselves.
    """

    among: Sent | None = None

    @cached_property
    def sent(self) -> dict[str, torch.Tensor]:
        """Arrays on the device, those of kernels, as bytes, under "step"."""
        if self.among is not None:
            sent = self.among.of(self)
        else:
            sent = device_copies.copy_in({"step": device_copies.packed(self.shapes), **self.arrays}, self.device)
        if self.late:
            sent["tokens"] = self._tokens[None].to(self.device)
        return sent

    @cached_property
    def step(self) -> dict[str, torch.Tensor]:
        """The arrays that kernels read, on the device."""
        if self.among is not None and self.among.stacked:
            return {name: array[self.number] for name, array in self.among.step.items()}
        return device_copies.views(self.sent["step"], self.shapes)

    def where(self) -> dict[str, torch.Tensor]:
        """The same, for kernels that are about to run, which add to them."""
        return self.step

    @property
    def tokens(self) -> torch.Tensor:
        return self.sent["tokens"] if "tokens" in self.sent else self.step["tokens"][None, : self.rows]

    @property
    def positions(self) -> torch.Tensor:
        if "positions" in self.sent:
            return self.sent["positions"]
        before = 0 if self.parents is None else self.first
        return self.step["places"][None, before : before + self.rows]

    def places(self, device: torch.device) -> torch.Tensor:
        return super().places(device) if self.parents is None else self.step["places"][: self.last].to(device)

    def seen(self, keys: int, device: torch.device) -> torch.Tensor:
        if self.parents is None:
            return super().seen(keys, device)
        return self.step["closure"][: self.rows, self.last - keys : self.last].to(device)

    @property
    def _scored(self) -> torch.Tensor | None:
        """int64 [R] the rows with logits; None for all."""
        return self.sent["rows"] if "rows" in self.asked else None

    def paths(self, device: torch.device) -> torch.Tensor:
        """int64 [R, D] the tokens of each scored row of a tree below its root; padded with the root's."""
        tokens, there = self.tokens[0], self.tokens.device
        columns = (self.places(there) - self.length) * self.seen(self.last, there)  # what it does not see to the root's
        paths = tokens[0].repeat(self.last, 1 + int(self.depths.max()))
        paths = paths.scatter(1, columns, tokens.expand(self.last, -1))[:, 1:]
        return (paths if self._scored is None else paths.index_select(0, self._scored)).to(device)

    def walk(self, own: torch.Tensor) -> torch.Tensor:
        """int64 [3] of a tree: the last row of the path that ``match`` accepts, its depth, and the token after it.

        Args:
            own: int64 [R] the target's token after each scored row.
        """
        device = own.device
        scored = None if self._scored is None else self._scored.to(device)
        tokens, accept = self.tokens[0].to(device), self.sent["accept"].to(device)
        depths = self.places(device) - self.length
        return last_row(own, tokens, self.seen(self.last, device), depths, accept, scored)


def last_row(
    own: torch.Tensor,
    tokens: torch.Tensor,
    closure: torch.Tensor,
    depths: torch.Tensor,
    accept: torch.Tensor,
    scored: torch.Tensor | None,
) -> torch.Tensor:
    """As :meth:`SentText.walk`, without a copy to the host; of equal siblings the first counts, as in ``match``.

    Args:
        own, scored: [R] the target's token after each scored row, and these rows; None for all.
        tokens, depths: [T].
        closure: bool [T, T], whether row i sees row j.
        accept: bool [T], whether a row may be accepted.
    """
    above = (closure & (depths[:, None] - 1 == depths)).long().argmax(-1)
    twice = (tokens[:, None] == tokens) & (above[:, None] == above) & accept
    twice = twice.tril(-1)[:, 1:].any(-1)  # the root is no sibling
    right = (own.index_select(0, _place(above, scored)) == tokens) & accept & ~twice
    right[:1] = True
    accepted = ~(closure & ~right).any(-1)
    # The accepted path is the longest one; its length is the number of rows that its last row sees.
    last = (accepted * closure.sum(-1)).argmax(-1, keepdim=True)
    return torch.cat((last, depths.index_select(0, last), own.index_select(0, _place(last, scored))))


def _place(rows: torch.Tensor, scored: torch.Tensor | None) -> torch.Tensor:
    """The places of rows among those with logits; of one without, any."""
    return rows if scored is None else torch.searchsorted(scored, rows).clamp_(max=len(scored) - 1)


class SentRows(Rows):
    """The rows there.

    Where rows of several sequences come ``again``, kernels' arrays have one more dimension: sequences, padded to a
    power of two, each with its rows padded to the longest. ``spread`` [sequences x rows] is the number of the row at
    each place, and ``packed`` [T] is the place of each row.

    Attributes:
        again: whether such rows come again, so that a graph may have them.
    """

    kind = SentText
    parts: Sequence[SentText]

    def __init__(self, step: StepInput, device: torch.device | None = None, backend: str = "auto") -> None:
        super().__init__(step, device, backend)
        counts = step.counts
        self.again = all(step.again) and max(counts) <= MOST_REPLAYED
        if len(counts) > 1:
            self.again = self.again and bucket(len(counts)) * bucket(max(counts)) <= _MOST_ROWS
        self._sent = None if self.alone else self._all()
        for part in self.parts:
            part.among = self._sent

    @property
    def there(self) -> Sequence[TextRows | None]:
        return self.parts

    @cached_property
    def shapes(self) -> Arrays:
        """The arrays of kernels, on the host, of all rows that come again; empty where each sequence has its own."""
        if self.alone:
            return self.parts[0].shapes
        return stacked(self.parts, self._padding) if self.again else {}

    @property
    def _padding(self) -> Padding:
        return padding_of(tuple(self.step.counts))

    def _all(self) -> Sent:
        """What is copied for several sequences."""
        arrays: Arrays = {}
        if self.again:
            padding = self._padding
            arrays = {"step": device_copies.packed(self.shapes), "spread": padding.spread, "packed": padding.packed}
        else:  # one array for all rows, of which each sequence has its part
            arrays["positions"] = np.concatenate([part.numbers[part.first :] for part in self.parts])[None]
            if not self.step.late:
                arrays["tokens"] = self.step.ids[None]
        for part in self.parts:
            each = part.asked
            if not self.again:
                if self.step.late and "tokens" in part.arrays:  # beside others that a device drafted
                    each = {"tokens": part.arrays["tokens"], **each}
                each = {"step": device_copies.packed(part.shapes), **each}
            arrays |= {f"{part.number} {name}": array for name, array in each.items()}
        return Sent(device_copies.copy_in(arrays, self.device), self.shapes)

    @property
    def sent(self) -> dict[str, torch.Tensor]:
        """Arrays on the device for all rows; those of kernels, as bytes, under "step"."""
        return self.parts[0].sent if self._sent is None else self._sent.views

    @property
    def tokens(self) -> torch.Tensor:
        if self.alone:
            return self.parts[0].tokens
        if not self.step.late:
            return self._of_step("tokens") if self.again else self.sent["tokens"]
        return torch.cat([part.tokens for part in self.parts], 1)

    @cached_property
    def positions(self) -> torch.Tensor:
        if self.alone:
            return self.parts[0].positions
        if not self.again:
            return self.sent["positions"]
        if not any(part.first for part in self.parts):
            return self._of_step("places")
        return torch.cat([part.positions for part in self.parts], 1)

    def _of_step(self, name: str) -> torch.Tensor:
        """[1, T] of the rows, of an array of kernels that has them at the places ``packed``."""
        assert self._sent is not None
        return self._sent.step[name].reshape(-1).index_select(0, self.sent["packed"])[None]

    def index(self, device: torch.device) -> torch.Tensor:
        """As :meth:`Rows.index`; rows that verification reads, too, are on the device already."""
        if self.alone and "rows" in self.parts[0].asked:
            return self.parts[0].sent["rows"].to(device)
        return super().index(device)

    def groups(self) -> tuple[list[Group], torch.Tensor]:
        """The sequences by their number of rows, for kernels that are about to run, by one copy to the device; and
        int64 [T], the place of each row in all groups' rows, one after the other.
        """
        made, order = grouped(self.parts)
        arrays = {f"{number} {name}": array for number, own in enumerate(made, 1) for name, array in own.items()}
        found = device_copies.copy_in({"order": order, **arrays}, self.device)
        windows = [slots.window for slots in self.parts[0].cache.group_of]
        groups = []
        for number, names in enumerate(made, 1):
            known = {name: found[f"{number} {name}"] for name in names}
            groups.append(Group(known, known.pop("rows"), windows))
        return groups, found["order"]


def rows_on(device: torch.device | None, step: StepInput, backend: str = "auto") -> Rows:
    """The rows of a forward for layers on a device."""
    return (SentRows if device_copies.is_apart(device) else Rows)(step, device, backend)
