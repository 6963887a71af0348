"""Records that reading leaves out: each with its place and reason, and only a few unless the options allow more."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from specdec.errors import ConfigError
from specdec.settings.formats import Record

__all__ = ["SKIPPING", "Skipping", "Skips"]

Skipping = Literal["few", "any"]
"""How many records of a file can be left out: a few (three, or one in a hundred), or any number."""

SKIPPING = ("few", "any")

_NAMED = 5  # number of places that a line names


@dataclass(slots=True)
class Skips:
    """The record of what was left out or mended.

    Attributes:
        skipped, mended: reason -> number of records.
        place: the file and place that is being read, such as ``line 3``; None where there is none.
        places: reason -> places of the records that were left out.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    mended: Counter[str] = field(default_factory=Counter)
    place: tuple[str, str] | None = None
    places: defaultdict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))

    def skip(self, reason: str) -> None:
        """Leave out the record that is being read."""
        self.skipped[reason] += 1
        if self.place is not None:
            self.places[reason].append(self.place)

    def lines(self) -> list[str]:
        """A line for each reason with its first places, the most frequent reason first."""
        return [
            f"{count} {what}: {reason}{self._where(reason) if what == 'skipped' else ''}"
            for what, reasons in (("skipped", self.skipped), ("mended", self.mended))
            for reason, count in reasons.most_common()
        ]

    def values(self, path: Path, records: Sequence[Record], skipping: Skipping, remedy: str) -> Iterator[Any]:
        """Yield the values of a file's records, and set each one's place while it is processed.

        Raises:
            ConfigError: after the last record, if more than a few were left out; ``remedy`` is the message's advice.
        """
        before = self.skipped.total()
        for record in records:
            self.place = path.name, record.place
            if record.error is None:
                yield record.value
            else:
                self.skip(record.error)
        self.place = None
        left_out = self.skipped.total() - before
        if skipping == "few" and left_out > max(3, len(records) // 100):
            raise ConfigError(
                f"{left_out} of {len(records)} records of {str(path)!r} are left out, which is more than a few: "
                f"{'; '.join(self.lines())}; mend them, or {remedy}"
            )

    def _where(self, reason: str) -> str:
        places = self.places[reason]
        files = [
            f"{file}, {', '.join(place for _, place in group)}"
            for file, group in groupby(places[:_NAMED], key=itemgetter(0))
        ]
        more = [f"{len(places) - _NAMED} more"] if len(places) > _NAMED else []
        return f" ({'; '.join([*files, *more])})" if places else ""
