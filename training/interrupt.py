"""Ctrl-C and SIGTERM in a run: the first ends it after the running step, the second at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

from specdec.errors import SpecdecWarning

__all__ = ["Stop", "stopping"]

_ONE_PRESS = 2.0  # seconds; a launcher hands the Ctrl-C on that its processes get from the terminal as well


class Stop:
    """What a run was asked for, and what it has kept.

    Attributes:
        signal: number of the signal that asked for the end; 0 where none did.
        kept: what is on the disk, in words.
        stepping: whether steps run, so that the end waits for the running one.
    """

    def __init__(self) -> None:
        self.signal, self.kept, self.stepping, self._at = 0, "", False, 0.0

    def received(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; raises where the run ends at once."""
        again, alone = self.signal != 0, int(os.environ.get("WORLD_SIZE", "1")) == 1
        if again and not alone and monotonic() - self._at < _ONE_PRESS:
            return
        self.signal, self._at = number, monotonic()
        if again or not self.stepping:
            raise self.end()
        if os.environ.get("RANK", "0") == "0":
            print("\nends after this step; once more ends it at once", file=sys.stderr, flush=True)

    def end(self) -> BaseException:
        """The exception that ends the run, as the signal would."""
        return SystemExit(128 + self.signal) if self.signal == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def stopping(main: bool) -> Iterator[Stop]:
    """Handle both signals in the block; the main process's warning says what is kept and what to do next.

    In a thread other than Python's main one, signals are left as they are.
    """
    stop, former = Stop(), {}
    if threading.current_thread() is threading.main_thread():
        former = {number: signal.signal(number, stop.received) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except (KeyboardInterrupt, SystemExit):
        if main and stop.kept:
            warnings.warn(
                f"interrupted: {stop.kept}; the same command goes on from there", SpecdecWarning, stacklevel=3
            )
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
