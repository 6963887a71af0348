"""First times: work that is done once for each kind of step, such as recording a CUDA graph or compiling a kernel.

It takes up to seconds, in a step of milliseconds. A step that has some of it says nothing of the steps after it, so its
time is left out wherever steps are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

__all__ = ["FirstTimes"]


class FirstTimes:
    """Counts the beginnings and ends of such work, in all threads: each waits where another one records or compiles.

    Attributes:
        seen: the count. A step within which it changed is not compared with others.
    """

    seen: ClassVar[int] = 0

    @classmethod
    @contextmanager
    def during(cls) -> Iterator[None]:
        """While inside, work is done that no later step of this kind does again."""
        cls.seen += 1
        try:
            yield
        finally:
            cls.seen += 1
