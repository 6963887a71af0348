"""Fallback: whether drafting pays at all.

A row policy weighs rows; it does not see the time of a drafter's own code. A tenth of a millisecond is little beside
the step of one sequence, but a tenth of a sequence's share of a step of eight. So where drafted steps yield less than
plain steps would, all sequences that share forwards rest: they take plain steps. Later they draft again, for as many
steps as a new comparison needs.

The yield is tokens per second. The tokens of a step vary with the text, so their mean is taken over many steps. The
time of a step varies with other processes, so it is taken from the latest steps of both kinds. Therefore some steps are
plain even where drafting wins: more of them where the two yields are close, or when the machine seems to have changed.
Whole steps are timed, relative to the cost curve, and a mean of the middle ones is taken, which a moment of another
process does not move.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import NamedTuple

from specdec.costs.live_curve import LiveCosts
from specdec.costs.prices import Rest, pace

__all__ = ["Fallback"]

# Numbers of steps:
_KNOWN, _AGAIN = 512, 48  # drafted steps from which tokens are known; and how many of them are kept after a rest
_DRAFTED, _PLAIN = 32, 5  # latest drafted and plain steps, from which times are known
_PACE = 15  # latest plain steps, which show whether the machine changed
_FIRST, _MOST = 128, 2000  # length of a rest: at first, and at most
_SETTLE = 16  # plain steps of a rest after which their time is known
_COLD = 8  # drafted steps after a rest whose tokens do not count: sessions have not seen the text of the rest
_FEW = 6  # least steps of a try, cold ones among them, where drafted steps were much slower than plain ones
_TRY, _EAGER = 16, 8  # drafted steps between two comparisons; fewer while less than twice _TRY are known
_OFTEN, _SELDOM = 8, 64  # drafted steps between two plain ones: in doubt, and at most

_LOSES = 0.98  # yield relative to plain steps below which sequences rest
_PRIOR, _PRIOR_STEPS = 1.15, 8  # prior of the relative yield, and its weight in steps
_SHARE = 0.01  # share of all time that failed tries, and plain steps while drafting wins, may cost
_MOVED = math.log(1.08)  # a larger change of the time of steps means that the machine changed
_TICK = 1e-9  # least seconds of a step, in case the clock did not advance


class _Brought(NamedTuple):
    """The outcome of a drafted step."""

    sequences: int
    tokens: int
    rows: int


class _Took(NamedTuple):
    """The time of a step."""

    rows: int
    length: int
    seconds: float


def _slower(steps: Iterable[_Took], seconds: Callable[[int, int], float]) -> float:
    """Time of steps relative to ``seconds(rows, length)`` of their forwards: the mean of the middle half.

    What slows one step in four does not count, and what slows every other step counts half.
    """
    each = sorted(step.seconds / seconds(step.rows, step.length) for step in steps)
    return fmean(each[len(each) // 4 : len(each) - len(each) // 4])


class _BatchSize:
    """The record of batches of about one size, and whether their sequences rest."""

    def __init__(self) -> None:
        self._brought: deque[_Brought] = deque(maxlen=_KNOWN)
        self._drafted: deque[_Took] = deque(maxlen=_DRAFTED)
        self._plain: deque[_Took] = deque(maxlen=_PACE)
        self._steps = 0  # drafted steps in all
        self._pace: float | None = None  # time of steps relative to the measured curve, at the latest look
        self._every, self._since = 4, 0  # drafted steps between two plain ones, and since the latest plain one
        self._cold, self._left = 0, _EAGER  # steps until tokens count, and until the next comparison
        self._resting, self._wait = False, _FIRST
        self._next = _COLD + _TRY  # drafted steps of the next try
        self._yield = _PRIOR  # relative to plain steps, at the latest comparison and without the prior
        self._rested, self._enough = 0, 0.0  # steps of this rest, and how many suffice if the machine changed

    @property
    def rests(self) -> Rest:
        if self._resting:
            return Rest.LONG if self._rested >= _SETTLE else Rest.STEP
        return Rest.STEP if self._since >= self._every else Rest.NONE

    def note(
        self, live: LiveCosts, length: int, sequences: int, tokens: int, plain: float | None, rows: int, seconds: float
    ) -> None:
        if self.rests:
            self._since = 0
            self._plain.append(_Took(sequences, length, seconds))
            if self._resting:
                self._rested += 1
                self._rest(live, length)
            return
        self._since += 1
        if plain is not None:  # nothing was guessed, so without its drafting the step is a plain one
            self._since = 0
            self._plain.append(_Took(sequences, length, plain))
        self._steps += 1
        self._drafted.append(_Took(rows, length, seconds))
        if self._cold > 0:
            self._cold -= 1
        else:
            self._brought.append(_Brought(sequences, tokens, rows))
        self._left -= 1
        if self._left <= 0:
            self._decide(live, length)

    def _compare(self, live: LiveCosts, length: int) -> float:
        """Yield of drafted steps relative to plain ones."""
        known = len(self._brought)
        if not (known and self._plain):
            return _PRIOR
        sequences, tokens, _ = map(sum, zip(*self._brought, strict=True))
        drafted, plain = (
            sum(count * live.seconds(rows, length) for rows, count in Counter(each).items())
            for each in ((step.rows for step in self._brought), (step.sequences for step in self._brought))
        )
        drafted *= _slower(self._drafted, live.seconds)
        plain *= _slower([*self._plain][-_PLAIN:], live.seconds)
        prior, self._yield = _PRIOR_STEPS / (_PRIOR_STEPS + self._steps), pace(tokens, drafted / (plain / sequences))
        return prior * _PRIOR + (1 - prior) * self._yield

    def _decide(self, live: LiveCosts, length: int) -> None:
        ahead = self._compare(live, length)
        sequences, tokens, _ = map(sum, zip(*self._brought, strict=True))
        each = tokens / sequences  # tokens of a sequence's step
        if ahead < _LOSES:
            lost = (1 / min(ahead, self._yield) - 1) * each  # cost of a drafted step, in plain steps
            # However much was lost, a rest ends: what made drafting slow may have gone. The next try is the shorter.
            self._next = round(min(max(_SHARE * _MOST / lost, _FEW), _COLD + _TRY))
            paid = lost * self._next / _SHARE
            rest = min(max(self._wait, paid), _MOST)
            self._resting, self._rested, self._pace, self._enough = True, 0, None, min(paid, _MOST) / 2
            self._left = round(rest)
            return
        moved = self._look(self._drafted, live)
        # A plain step costs the tokens that a drafted one would have added; that one takes each / ahead plain steps.
        due = (ahead - 1) * ahead / (each * _SHARE)
        self._every = _OFTEN if moved else round(min(max(due, _OFTEN), _SELDOM))
        self._left = _EAGER if self._steps < 2 * _TRY else _TRY
        self._wait = max(self._wait // 2, _FIRST)

    def _look(self, steps: Iterable[_Took], live: LiveCosts) -> bool:
        """Whether the time of steps changed since the latest look."""
        pace = _slower(steps, live.measured_seconds)
        if self._pace is not None and abs(math.log(pace / self._pace)) <= _MOVED:
            return False
        known, self._pace = self._pace is not None, pace
        return known

    def _rest(self, live: LiveCosts, length: int) -> None:
        self._left -= 1
        over = self._left <= 0
        if self._rested == _SETTLE:
            if self._compare(live, length) > 1:  # the machine became slower, and plain steps take longer now, too
                self._resting, self._pace, self._left, self._every = False, None, _TRY, _OFTEN
                return
            self._look(self._plain, live)
            self._wait = min(2 * self._wait, _MOST)
        elif self._rested % _SETTLE == 0 and self._rested > self._enough:
            over |= self._look(self._plain, live)
        if over:
            self._resting, self._pace, self._every = False, None, _OFTEN
            self._cold, self._left = self._next * _COLD // (_COLD + _TRY), self._next
            self._drafted.clear()
            while len(self._brought) > _AGAIN:
                self._brought.popleft()


class Fallback:
    """Decides for an engine whether sequences that share forwards draft or rest.

    Args:
        live: the cost curve.
    """

    def __init__(self, live: LiveCosts) -> None:
        self._live = live
        self._by_batch_size = defaultdict[tuple[int, bool], _BatchSize](_BatchSize)

    def rests(self, sequences: int, drawn: bool) -> Rest:
        """Whether the next step is a plain one, and whether many more are to come.

        ``sequences``: their number; ``drawn``: whether one of them samples.
        """
        return self._of(sequences, drawn).rests

    def note(
        self,
        sequences: int,
        drawn: bool,
        *,
        tokens: int,
        length: int,
        rows: int,
        whole: bool,
        drafting: float,
        seconds: float,
    ) -> None:
        """Record a step.

        Args:
            sequences: number of sequences in the forward.
            drawn: whether any of them samples.
            tokens: tokens that all sequences together emitted.
            length: tokens before the step, on average.
            rows: rows of the forward.
            whole: whether all rows went through all layers; a draft with an entry skips the first ones.
            drafting: seconds of proposing and observing, a part of ``seconds``.
            seconds: seconds of the whole step.
        """
        plain = max(seconds - drafting, _TICK) if whole and rows == sequences else None
        self._of(sequences, drawn).note(self._live, length, sequences, tokens, plain, rows, max(seconds, _TICK))

    def _of(self, sequences: int, drawn: bool) -> _BatchSize:
        """The record of about ``sequences`` sequences; there is one per power of two."""
        return self._by_batch_size[sequences.bit_length(), drawn]
