"""Budget: how many rows pay for themselves.

A step that takes longer has to bring more. With ``rate`` the tokens per second of late, T the cost curve and g the
chance that a row is accepted, n rows are worth ``sum(g) - rate * (T(n) - T(1))`` tokens more than a plain step, and the
n that maximises this is taken: none where speculation loses. What is chosen depends on past steps and on the clock,
never on the draws of the step that it is chosen for, so sampling stays lossless.

Without a clock there is a drafter's *credit*: what its rows are supposed to cost against what was accepted of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec.cost import CostCurve, cost_curve
from specdec.draft import Draft
from specdec.errors import ConfigError
from specdec.target import Target

__all__ = ["Budget", "Credit", "Patience", "check_budget", "make_budget", "row_cost"]

_BUCKET = 256  # tokens of context for which one reading of the curve serves
_FIRST, _FALL = 0.4, 0.8  # chance of the first row before any was seen, enough to try; of a row, by the one before it
_PRIOR_WEIGHT = 2.0
_UNTRIED = 0.98  # memory of rows that were not proposed
_TRY = 9  # rows of a try
_OUTLIER = 3.0  # a step that took longer than this many times what was due met another process, not a dearer forward

_CACHED = 20e6  # weights that a CPU's caches hold
_START, _MOST = 0.75, 3.0  # credit in tokens: at first, and the most that a drafter can save up
_STEP_ROWS = 1  # rows that a draft costs beyond its own: other kernels than a single row's, and a path to verify


def row_cost(target: Target) -> float:
    """What a row is supposed to add to a step, in plain steps, where nothing was measured.

    A plain step reads the weights. On a CPU that keeps them in its caches, a row's arithmetic counts for more.
    """
    if target.device.type != "cpu":
        return 0.002
    weights = target.num_layers * 12 * target.hidden_size**2  # about: the shapes of most decoders
    return 0.15 if weights < _CACHED else 0.06


class Patience:
    """When to try again what did not pay: after 4 steps, and after twice as many each time that it failed again."""

    def __init__(self, first: int = 4, most: int = 64) -> None:
        self._first, self._most = first, most
        self._wait = first
        self._left = first

    def due(self) -> bool:
        """Count a step that goes without; whether the next try is due with it."""
        self._left -= 1
        if self._left > 0:
            return False
        self._wait = min(2 * self._wait, self._most)
        self._left = self._wait
        return True

    def paid(self) -> None:
        """It paid: the next disappointment is met with little patience again."""
        self._wait = self._left = self._first


class Credit:
    """Whether to ask a drafter, by acceptance alone: the same drafts, and so the same text, at the same seed.

    Accepted rows are income, rows are expenses, and nobody spends more than he has. A drafter whose credit is used up
    rests; it gets that of one row for a try now and then, more rarely each time that this is lost too. One serves one
    sequence.

    Args:
        row_cost: of a row, in plain steps.
        effort: rows that asking the drafter is worth.
    """

    def __init__(self, row_cost: float, effort: int = 0) -> None:
        self._row_cost, self._fixed = row_cost, _STEP_ROWS + effort
        self._left = _START
        self._patience = Patience(1, 32)

    def room(self, limit: int, length: int) -> int:
        """Rows that it can pay for: the root alone where that is none."""
        least = self._row_cost * (1 + self._fixed)
        if self._left < least:
            if not self._patience.due():
                return min(limit, 1)
            self._left = least
        return min(limit, 1 + round(self._left / self._row_cost) - self._fixed)

    def learn(self, draft: Draft, path: Sequence[int], length: int, drafting: float, seconds: float) -> None:
        """Take note of a step; a drafter that had nothing to say is not judged."""
        if len(draft) == 1:
            return
        spent = self._row_cost * (len(draft) - 1 + self._fixed)
        self._left = min(self._left + len(path) - 1 - spent, _MOST)
        if self._left >= _START:
            self._patience.paid()


class Budget:
    """What rows cost and what they bring, lately. One serves all sequences of an engine.

    Args:
        curve: the target's.
        memory: weight of the past, from one step to the next.
    """

    def __init__(self, curve: CostCurve, *, memory: float = 0.95) -> None:
        self.curve = curve
        self._memory = memory
        self._read: dict[tuple[int, int], list[float]] = {}
        plain = self.seconds(0, 1)[1]
        self._tokens, self._time = 10.0, 10.0 * plain  # of late; the prior is plain decoding
        self._taken, self._due = 10.0 * plain, 10.0 * plain  # outside of drafting; by the clock and by the curve
        self._hits: list[float] = []  # per row number: accepted, and seen
        self._tries: list[float] = []
        self._draft = 0.0  # seconds of drafting, per step that drafted
        self._patience = Patience()
        self._priced: tuple[list[float], list[float]] = ([], [])  # seconds, and their price until the next step
        self._rests = False  # rows did not pay when last weighed, and are not weighed until the next try is due

    def seconds(self, length: int, most: int) -> list[float]:
        """The curve's seconds of 0 .. ``most`` rows, or more, near a length."""
        most = max(16, 1 << most.bit_length())  # a few sizes serve all, so that the curve is seldom read
        key = (length // _BUCKET, most)
        if key not in self._read:
            self._read[key] = self.curve.at(length // _BUCKET * _BUCKET + _BUCKET // 2, most)
        return self._read[key]

    @property
    def rate(self) -> float:
        """Tokens per second of late, or of plain steps where these are faster."""
        drift = self._taken / self._due
        return max(self._tokens / self._time, 1 / (drift * self.seconds(0, 1)[1]))

    def price(self, length: int, most: int) -> list[float]:
        """Tokens that the extra time of n rows over a plain step would have brought, for n in 0 .. ``most`` or more."""
        seconds = self.seconds(length, most)
        if self._priced[0] is not seconds:
            rate, plain = self.rate * self._taken / self._due, seconds[1]
            self._priced = seconds, [rate * (time - plain) for time in seconds]
        return self._priced[1]

    def keep(self, gains: Sequence[float], length: int, *, base: int = 1, least: float = 0.0) -> int:
        """How many of the rows to keep, best first, beside ``base`` rows that are there anyway.

        ``gains``: each row's chance to be accepted. None are kept unless all together bring more than their price and
        ``least`` tokens.
        """
        price = self.price(length, base + len(gains))
        best, worth, total = 0, least, 0.0
        for count, gain in enumerate(gains, 1):
            total += gain
            if total - (price[base + count] - price[base]) > worth:
                best, worth = count, total - (price[base + count] - price[base])
        return best

    def room(self, limit: int, length: int) -> int:
        """Rows to allow a drafter that fills its room in order of promise: 1 where a plain step is better."""
        if limit < 2 or (self._rests and not self._patience.due()):
            return min(limit, 1)
        known = min(limit - 1, max(len(self._hits), 8))
        count = self.keep(self._gains(known), length, least=self.rate * self._draft)
        if count:
            self._rests = False
            self._patience.paid()
            return count + 1 if count < known else limit
        again, self._rests = self._rests, True
        return min(limit, _TRY) if again else 1

    def learn(self, draft: Draft, path: Sequence[int], length: int, drafting: float, seconds: float) -> None:
        """Take note of a step: what was verified after ``length`` tokens, the accepted rows, and what it took.

        ``drafting`` seconds are among the ``seconds``.
        """
        memory, rows = self._memory, len(draft)
        self._priced = ([], [])
        due = self.seconds(length, rows)[rows]
        taken = min(seconds - drafting, _OUTLIER * due * max(self._taken / self._due, 1.0))
        self._taken = memory * self._taken + taken
        self._due = memory * self._due + due
        self._tokens = memory * self._tokens + len(path)
        self._time = memory * self._time + taken + drafting
        if rows == 1:
            return
        self._draft += (1 - memory) * (drafting - self._draft)
        self._hits += [0.0] * (rows - len(self._hits))
        self._tries += [0.0] * (rows - len(self._tries))
        accepted = set(path)
        for row in range(1, len(self._hits)):
            past = memory if row < rows else _UNTRIED
            self._hits[row] = past * self._hits[row] + (row in accepted)
            self._tries[row] = past * self._tries[row] + (row < rows)

    def _gains(self, most: int) -> list[float]:
        """The chance of each of the rows 1 .. ``most``; what is not known of a row follows from the row before it."""
        gains, gain = list[float](), _FIRST / _FALL
        for row in range(1, most + 1):
            hits, tries = (self._hits[row], self._tries[row]) if row < len(self._hits) else (0.0, 0.0)
            gain = (hits + _PRIOR_WEIGHT * _FALL * gain) / (tries + _PRIOR_WEIGHT)
            gains.append(gain)
        return gains


def check_budget(choice: str) -> str:
    """The choice, if it may be one.

    Raises:
        ConfigError: neither credit, auto nor off, and no file.
    """
    if choice not in ("credit", "auto", "off") and not Path(choice).is_file():
        raise ConfigError(
            f"budget={choice!r} is unknown; choose credit, auto, off, or a cost file made by `specdec tune --out FILE`"
        )
    return choice


def make_budget(choice: str, target: Target, known: dict[str, CostCurve] | None = None) -> Budget | None:
    """The budget for a target: from its kept or newly measured cost curve, or from a file; else None.

    ``known``: curves by choice that need not be read again; one that is read is put there.
    """
    if choice in ("credit", "off"):
        return None
    known = {} if known is None else known
    if choice not in known:
        known[choice] = cost_curve(target, None if choice == "auto" else choice)
    return Budget(known[choice])
