"""Fallback: whether to draft at all.

Policies weigh rows, and what a drafter's own code takes is no row: a tenth of a millisecond is little beside the step
of one sequence, and a tenth of a sequence's share of a step that eight take together. So where drafted steps yield less
than plain ones would, all sequences that share their forwards rest: no session drafts. Later they draft for as long
as it takes to know better.

A yield is tokens by time. Tokens depend on the text, and are known from many steps only. Time depends on who else uses
the machine, changes within seconds, and is known from few steps, of both kinds: so some steps are plain ones even where
drafting wins, the more the nearer the two are and whenever the machine seems to be another one. Steps are timed whole,
and against each other: by how many times what the curve says the middle ones take, which a moment of another process
does not change.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import NamedTuple

from specdec.costs.live_curve import LiveCosts

__all__ = ["Fallback"]

# In steps:
_KNOWN, _AGAIN = 512, 48  # drafted ones that the tokens are known from; and of those before a rest, after it
_DRAFTED, _PLAIN = 32, 5  # the latest ones, which say what a step takes now: of about as long a time, where in doubt
_PACE = 15  # plain ones, which say whether the machine is another one
_FIRST, _MOST = 128, 2000  # of a rest: at first, and after others that ended in vain
_SETTLE = 16  # of a rest, after which it is known what plain steps take now
_COLD = 8  # drafted after a rest, by sessions that missed what was said meanwhile, whose tokens do not count
_TRY, _EAGER = 16, 8  # drafted between two comparisons; and before as many are known as two of them take
_OFTEN, _SELDOM = 8, 64  # drafted between two plain ones: where it is in doubt, and at most

_LOSES = 0.98  # of the yield of plain steps: with less they rest
_PRIOR, _PRIOR_STEPS = 1.15, 8  # yield, of that of plain steps, before there was any; and the steps that it counts as
_SHARE = 0.01  # of all time that tries in vain, and plain steps where drafting wins, may cost
_MOVED = math.log(1.08)  # a machine whose steps take so much longer or shorter is another one
_TICK = 1e-9  # seconds that a step takes where the clock does not see them


class _Brought(NamedTuple):
    """What came of a drafted step."""

    sequences: int
    tokens: int
    rows: int


class _Took(NamedTuple):
    """What a step took."""

    rows: int
    length: int
    seconds: float


def _slower(steps: Iterable[_Took], seconds: Callable[[int, int], float]) -> float:
    """The time of steps, by ``seconds(rows, length)`` of their forwards.

    The mean of the middle half: what happens to one step in four counts for nothing, and what happens to every other
    one for half.
    """
    each = sorted(step.seconds / seconds(step.rows, step.length) for step in steps)
    return fmean(each[len(each) // 4 : len(each) - len(each) // 4])


class _BatchSize:
    """What is known of sequences that decode together, and whether they rest."""

    def __init__(self) -> None:
        self._brought: deque[_Brought] = deque(maxlen=_KNOWN)
        self._drafted: deque[_Took] = deque(maxlen=_DRAFTED)
        self._plain: deque[_Took] = deque(maxlen=_PACE)
        self._steps = 0  # drafted ones, ever
        self._pace: float | None = None  # of the machine, when it was last looked at, by the measured curve
        self._every, self._since = 4, 0  # drafted steps between two plain ones, and since the latest one
        self._cold, self._left = 0, _EAGER  # steps until tokens count, and until the next comparison
        self._resting, self._wait = False, _FIRST
        self._rested, self._enough = 0, 0.0  # steps of this rest, and how many are enough if the machine changes

    @property
    def rests(self) -> bool:
        return self._resting or self._since >= self._every

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
        if plain is not None:  # nothing was guessed, and what it took beside drafting is what a plain one takes
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
        """What drafted steps yield, of what plain ones do."""
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
        prior = _PRIOR_STEPS / (_PRIOR_STEPS + self._steps)
        return prior * _PRIOR + (1 - prior) * (tokens / drafted) / (sequences / plain)

    def _decide(self, live: LiveCosts, length: int) -> None:
        ahead = self._compare(live, length)
        sequences, tokens, _ = map(sum, zip(*self._brought, strict=True))
        each = tokens / sequences  # tokens of a sequence's step
        if ahead < _LOSES:
            lost = (1 / ahead - 1) * each * (_COLD + _TRY)  # by the next try, in plain steps
            self._resting, self._rested, self._pace, self._enough = True, 0, None, lost / (2 * _SHARE)
            self._left = round(max(self._wait, lost / _SHARE))
            return
        moved = self._look(self._drafted, live)
        # A plain step costs what it would have brought more as a drafted one, which takes each / ahead of it.
        due = (ahead - 1) * ahead / (each * _SHARE)
        self._every = _OFTEN if moved else round(min(max(due, _OFTEN), _SELDOM))
        self._left = _EAGER if self._steps < 2 * _TRY else _TRY
        self._wait = max(self._wait // 2, _FIRST)

    def _look(self, steps: Iterable[_Took], live: LiveCosts) -> bool:
        """Whether such steps take something else now than when they were last looked at."""
        pace = _slower(steps, live.measured_seconds)
        if self._pace is not None and abs(math.log(pace / self._pace)) <= _MOVED:
            return False
        known, self._pace = self._pace is not None, pace
        return known

    def _rest(self, live: LiveCosts, length: int) -> None:
        self._left -= 1
        over = self._left <= 0
        if self._rested == _SETTLE:
            if self._compare(live, length) > 1:  # it was the machine, and plain steps take longer now, too
                self._resting, self._pace, self._left, self._every = False, None, _TRY, _OFTEN
                return
            self._look(self._plain, live)
            self._wait = min(2 * self._wait, _MOST)
        elif self._rested % _SETTLE == 0 and self._rested > self._enough:
            over |= self._look(self._plain, live)
        if over:
            self._resting, self._pace, self._every = False, None, _OFTEN
            self._cold, self._left = _COLD, _COLD + _TRY
            self._drafted.clear()
            while len(self._brought) > _AGAIN:
                self._brought.popleft()


class Fallback:
    """Whether sequences that share their forwards draft; one serves an engine.

    Args:
        live: what forwards take.
    """

    def __init__(self, live: LiveCosts) -> None:
        self._live = live
        self._by_batch_size: dict[tuple[int, bool], _BatchSize] = {}

    def rests(self, sequences: int, drawn: bool) -> bool:
        """Whether the next step of ``sequences`` sequences is a plain one; ``drawn``: whether one of them samples."""
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
        """Take note of a step.

        Args:
            sequences: that shared the forward.
            drawn: whether one of them samples.
            tokens: that all sequences together got.
            length: tokens before the step, on average.
            rows: of the forward.
            whole: whether all rows went through all layers; a draft with an entry skips the first ones.
            drafting: seconds of proposing and observing, a part of ``seconds``.
            seconds: of the whole step.
        """
        plain = max(seconds - drafting, _TICK) if whole and rows == sequences else None
        self._of(sequences, drawn).note(self._live, length, sequences, tokens, plain, rows, max(seconds, _TICK))

    def _of(self, sequences: int, drawn: bool) -> _BatchSize:
        """What is kept for about ``sequences`` sequences: one record for each power of two."""
        kind = sequences.bit_length(), drawn
        record = self._by_batch_size.get(kind)
        if record is None:
            record = self._by_batch_size[kind] = _BatchSize()
        return record
