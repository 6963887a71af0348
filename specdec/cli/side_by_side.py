"""Panes: several streams side by side on a terminal, each with the steps' colours and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specdec.cli.output import COLOURS, PICTURES

if TYPE_CHECKING:
    from specdec.results import Chunk

__all__ = ["Panes"]

_REFRESH = 0.08  # seconds
_NARROWEST = 36  # columns of a pane


class Panes:
    """A pane for each name; to be called with a name, a chunk of its stream and its tokens per second.

    It draws between steps only, so that no step is timed while a terminal is written to. Where a text is longer than
    its pane, its end is seen.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._texts = {name: Text() for name in names}
        self._colours = {name: cycle(COLOURS) for name in names}
        self._speeds = dict.fromkeys(names, "")
        self._live = Live(self.drawn(), console=console, auto_refresh=False, vertical_overflow="crop")
        self._drawn = monotonic()

    def __enter__(self) -> Panes:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.update(self.drawn(), refresh=True)
        self._live.__exit__(kind, error, trace)

    def __call__(self, name: str, chunk: Chunk, speed: float) -> None:
        speculated = chunk.step is not None and len(chunk.step.tokens) > 1
        self._texts[name].append(chunk.text.translate(PICTURES), next(self._colours[name]) if speculated else None)
        self._speeds[name] = f"  {speed:.0f} tokens/s" + (", done" if chunk.finish_reason else "")
        if monotonic() - self._drawn > _REFRESH:
            self._live.update(self.drawn(), refresh=True)
            self._drawn = monotonic()

    def drawn(self) -> Table:
        """All panes as they are now, as many beside each other as are readable."""
        width, height = self._console.size
        across = max(1, min(len(self._texts), width // _NARROWEST))
        if across < len(self._texts):  # no row with a hole where it can be helped
            across = max(n for n in range(1, across + 1) if len(self._texts) % n == 0)
        down = -(-len(self._texts) // across)
        lines = max(3, (height - 2) // down - 2)
        grid = Table.grid(expand=True)
        for _ in range(across):
            grid.add_column(ratio=1)
        panes = [self._pane(name, width // across - 4, lines) for name in self._texts]
        for first in range(0, len(panes), across):
            grid.add_row(*panes[first : first + across])
        return grid

    def _pane(self, name: str, width: int, lines: int) -> Panel:
        wrapped = self._texts[name].wrap(self._console, width)
        seen = Text("\n").join(wrapped[-lines:])
        title = Text.assemble((name, "bold"), (self._speeds[name], "dim"))
        return Panel(seen, title=title, title_align="left", height=lines + 2)
