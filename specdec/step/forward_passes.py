"""Pass: a model run that a drafting session waits for; passes of several sequences are run as one.

A drafter that runs a model writes its drafting as a generator (``BatchedSession.passes``). It yields each pass and is
sent the pass's output. The caller runs passes one by one, or those of several sequences together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from specdec.errors import DraftError, shown

__all__ = ["Pass", "Passes", "alone", "resume", "run_all", "run_together", "waiting_for"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Pass:
    """A model run that a session waits for.

    Attributes:
        run: maps the inputs of several sequences to their outputs, in order. Passes with an equal ``run``, such as a
            method of a shared drafter, are run together.
        brought: this sequence's input.
        batch_invariant: whether the output is the same, bit for bit, whatever the other inputs are.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    brought: Any
    batch_invariant: bool = False


Passes = Generator[Pass, Any, T]
"""A generator that yields passes, is sent the output of each, and returns the draft."""


def resume(passes: Passes[T], answer: Any) -> Pass:
    """The next pass. ``answer`` is the output of the last one, None at first, or an error to raise in the generator.

    Raises:
        StopIteration: there is no further pass; its ``value`` is the result.
    """
    return passes.throw(answer) if isinstance(answer, Exception) else passes.send(answer)


def run_together(passes: Sequence[Pass]) -> list[Any]:
    """The output of each pass, in order, or its error; passes with an equal ``run`` are run at once."""
    answers: list[Any] = [None] * len(passes)
    left = [*range(len(passes))]
    while left:
        run = passes[left[0]].run
        group = [place for place in left if passes[place].run == run]
        left = [place for place in left if place not in group]
        try:
            found = run([passes[place].brought for place in group])
            if len(found) != len(group):
                raise DraftError(f"{run} gave {len(found)} answers to {len(group)} passes; it must give one to each")
        except Exception as error:
            found = [error] * len(group)
        for place, answer in zip(group, found, strict=True):
            answers[place] = answer
    return answers


def run_all(several: Sequence[Passes[T]]) -> list[T | Exception]:
    """The result of each generator of passes, or its error; passes that wait at the same time are run together."""
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
    """The result of a generator whose passes are run one by one."""
    (result,) = run_all([passes])
    if isinstance(result, Exception):
        raise result
    return result


def waiting_for(passes: Passes[T], *, together: bool) -> Passes[T]:
    """The same passes, each checked to be one.

    With ``together=False``, passes that are not ``batch_invariant`` are run at once by themselves, not yielded.
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
        elif together or asked.batch_invariant:
            try:
                answer = yield asked
            except Exception as error:
                answer = error
        else:
            (answer,) = run_together([asked])
