"""Pass: what a drafting session waits for while a model runs; those of several sequences are run as one.

A drafter that runs a model writes its drafting as a generator (``BatchedSession.passes``), which yields each pass and
is sent what it gave. Whoever drives it runs the passes one by one, or those of several sequences together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from specdec.errors import DraftError, shown

__all__ = ["Pass", "Passes", "Waited", "alone", "resume", "run_all", "run_together", "timed"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Pass:
    """What a session waits for.

    Attributes:
        run: what several sequences brought, to what each of them gets, in order. It serves those whose ``run`` is
            equal, as a method of the drafter that they share is.
        brought: by this sequence.
        batch_invariant: what it gets is the same, bit for bit, whatever others bring.
        seconds: that it took, once it was run; an equal share where others were run with it.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    brought: Any
    batch_invariant: bool = False
    seconds: float = field(default=0.0, init=False)


Passes = Generator[Pass, Any, T]
"""Yields passes, is sent what each of them gave, and returns what it was all for."""


def resume(passes: Passes[T], answer: Any) -> Pass:
    """The next pass, after the answer to the one before; None at first. An error is raised where it was waited for.

    Raises:
        StopIteration: there is none; its ``value`` is the result.
    """
    return passes.throw(answer) if isinstance(answer, Exception) else passes.send(answer)


def run_together(passes: Sequence[Pass]) -> list[Any]:
    """What each pass gives, in order, or the error that it ended with; those with an equal ``run`` are run at once."""
    answers: list[Any] = [None] * len(passes)
    left = [*range(len(passes))]
    while left:
        run = passes[left[0]].run
        group = [place for place in left if passes[place].run == run]
        left = [place for place in left if place not in group]
        began = perf_counter()
        try:
            found = run([passes[place].brought for place in group])
            if len(found) != len(group):
                raise DraftError(f"{run} gave {len(found)} answers to {len(group)} passes; it must give one to each")
        except Exception as error:
            found = [error] * len(group)
        seconds = perf_counter() - began
        for place, answer in zip(group, found, strict=True):
            answers[place], passes[place].seconds = answer, seconds / len(group)
    return answers


def run_all(several: Sequence[Passes[T]]) -> list[T | Exception]:
    """What comes of each sequence's passes, or the error that it ended with; passes that wait together are run so."""
    results: list[Any] = [*several]
    places: Iterable[int] = range(len(several))
    answers: Sequence[Any] = [None] * len(several)
    while True:
        waiting: list[Pass] = []
        waits: list[int] = []
        for place, answer in zip(places, answers, strict=True):
            try:
                waiting.append(resume(several[place], answer))
                waits.append(place)
            except StopIteration as done:
                results[place] = done.value
            except Exception as error:
                results[place] = error
        if not waiting:
            return results
        places, answers = waits, run_together(waiting)


def alone(passes: Passes[T]) -> T:
    """What comes of passes, each run by itself."""
    (result,) = run_all([passes])
    if isinstance(result, Exception):
        raise result
    return result


@dataclass(slots=True)
class Waited:
    """Seconds that a session waited so far.

    Attributes:
        passes: for its passes.
        others: for others who drafted meanwhile.
    """

    passes: float = 0.0
    others: float = 0.0


def timed(passes: Passes[T], waited: Waited, *, together: bool = True) -> Passes[T]:
    """The same passes, whose time is added to what was ``waited``.

    ``together`` False: passes that are not ``batch_invariant`` are run by themselves, here and now.
    """
    answer = None
    while True:
        try:
            asked = resume(passes, answer)
        except StopIteration as done:
            result: T = done.value
            return result
        if not isinstance(asked, Pass):
            answer = DraftError(f"a session waits for {shown(asked)}, of type {type(asked).__name__}; yield a Pass")
            continue
        if together or asked.batch_invariant:
            began = perf_counter()
            try:
                answer = yield asked
            except Exception as error:
                answer = error
            waited.others += perf_counter() - began - asked.seconds
        else:
            (answer,) = run_together([asked])
        waited.passes += asked.seconds
