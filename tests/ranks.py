"""Several ranks in one process, a thread each: the same code as over torch.distributed, but for the exchange itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from specdec.errors import ParallelError
from specdec.parallel.ranks import Ranks

__all__ = ["ThreadRanks", "results", "run_ranks"]

T = TypeVar("T")


class _Hub:
    """Where ranks meet: the values of each exchange, by its number."""

    def __init__(self, size: int) -> None:
        self.size, self._met = size, threading.Condition()
        self._values: list[dict[int, Any]] = []
        self._gone = False

    def exchange(self, number: int, rank: int, value: Any) -> list[Any]:
        """Raises RuntimeError where a rank ended before it came."""
        with self._met:
            if number == len(self._values):
                self._values.append({})
            found = self._values[number]
            found[rank] = value
            self._met.notify_all()
            if not self._met.wait_for(lambda: len(found) == self.size or self._gone, timeout=60) or (
                len(found) < self.size
            ):
                raise RuntimeError("a thread has ended")
            return [found[rank] for rank in range(self.size)]

    def leave(self) -> None:
        with self._met:
            self._gone = True
            self._met.notify_all()


class ThreadRanks(Ranks):
    """As one thread sees them.

    Attributes:
        sent: bytes of each collective of a step, those between texts (``patient``) left out.
        greetings: collectives between texts.
    """

    def __init__(self, rank: int, size: int, hub: _Hub) -> None:
        self.rank, self.size, self._hub = rank, size, hub
        self._device, self._late = "cpu", 60.0
        self.sent: list[int] = []
        self.greetings = self._exchanges = 0

    def _all(self, tensor: torch.Tensor, patient: bool) -> list[torch.Tensor]:
        found = self._exchange(tensor.clone())
        if patient:
            self.greetings += 1
        else:
            self.sent.append(tensor.nbytes)
        return found

    def gather(self, words: torch.Tensor, *, patient: bool = False) -> torch.Tensor:
        return torch.stack(self._all(words, patient))

    def lead(self, tensor: torch.Tensor, *, patient: bool = False) -> torch.Tensor:
        return self._all(tensor, patient)[0].clone()

    def broadcast(self, value: Any) -> Any:
        """As it is; nothing is written out."""
        return self._exchange(value)[0]

    def _exchange(self, value: Any) -> list[Any]:
        self._exchanges += 1
        try:
            return self._hub.exchange(self._exchanges - 1, self.rank, value)
        except RuntimeError as error:
            raise self._lost(error) from error


def run_ranks(size: int, work: Callable[[ThreadRanks], T]) -> list[T | Exception]:
    """What each of ``size`` ranks returned or raised; one that raises takes the others' next exchange with it."""
    hub = _Hub(size)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRanks(rank, size, hub))
        except Exception as error:
            found[rank] = error
            hub.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def results(found: Sequence[T | Exception]) -> list[T]:
    """The ranks' results.

    Raises:
        Exception: the first error that is not another rank's end.
    """
    errors = [error for error in found if isinstance(error, Exception)]
    for error in errors:
        if not isinstance(error, ParallelError) or "has lost" not in str(error):
            raise error
    if errors:
        raise errors[0]
    return [one for one in found if not isinstance(one, Exception)]
