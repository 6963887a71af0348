"""Fallback: whether to draft at all.

Policies weigh rows, and what a drafter's own code takes is no row: a tenth of a millisecond is little beside the step
of one sequence, and a tenth of a sequence's share of a step that eight take together. So where drafted steps yield less
than plain ones would, by what forwards take now and by what drafting took, all sequences that share their forwards
rest: no session is asked. Later they draft for as long as it takes to know better. Where it is in doubt, one step in
some is a plain one, as what these take now is known from nothing else.
"""

from __future__ import annotations

from specdec.live import LiveCosts

__all__ = ["Fallback"]

# In tokens, of all sequences together:
_LATELY = 2000  # of which the yield is the mean
_FIRST, _MOST = 500, 4000  # of a rest: at first, and after others that ended in vain
_COLD = 100  # drafted after a rest, by sessions that missed what was said meanwhile, which do not count
_TRY = 200  # between two comparisons

_NEWS = 0.4  # weight of a comparison beside those before it
_LOSES, _WINS = 0.98, 1.15  # times the yield of plain steps: with less they rest, with more there is no doubt
_PROBE = 16  # steps of which one is plain where it is in doubt


class _Company:
    """What is known of sequences that decode together, and whether they rest."""

    def __init__(self) -> None:
        # Of drafted steps: their number, sequences, tokens, and seconds of drafting; number and rows of those whose
        # forwards are like measured ones, and the seconds of the others' forwards.
        self._sums = [0.0] * 7
        self._latest: list[tuple[int, int, float, int | None, float]] = []  # steps since then, see _sum_up
        self._ahead = _WINS  # what drafted steps yield, of what plain steps do
        self._resting = False
        self._wait = _FIRST
        self._cold, self._left = 0, _TRY  # tokens until steps count, and until the next decision
        self._drafted = 0  # steps since a plain one, where it is in doubt

    @property
    def rests(self) -> bool:
        return self._resting or self._drafted >= _PROBE

    def note(
        self,
        live: LiveCosts,
        length: int,
        sequences: int,
        tokens: int,
        drafting: float,
        rows: int | None,
        seconds: float,
    ) -> None:
        if self._resting:
            self._left -= tokens
            if self._left <= 0:
                self._resting, self._cold, self._left = False, _COLD, _TRY
                self._keep(min(_TRY / self._sums[2], 1.0))
        elif self.rests:
            self._drafted = 0
        else:
            self._drafted += self._ahead < _WINS
            if self._cold > 0:
                self._cold -= tokens
                return
            self._latest.append((sequences, tokens, drafting, rows, seconds))
            self._left -= tokens
            if self._left <= 0:
                self._decide(live, length)

    def _keep(self, share: float) -> None:
        self._sums = [share * known for known in self._sums]

    def _sum_up(self) -> None:
        for sequences, tokens, drafting, rows, seconds in self._latest:
            self._keep(max(1 - tokens / _LATELY, 0.0))
            forward = (0, 0, seconds) if rows is None else (1, rows, 0.0)
            step = (1, sequences, tokens, drafting, *forward)
            self._sums = [known + new for known, new in zip(self._sums, step, strict=True)]
        self._latest.clear()

    def _decide(self, live: LiveCosts, length: int) -> None:
        self._sum_up()
        steps, sequences, tokens, drafting, whole, rows, seconds = self._sums
        if whole:
            seconds += whole * live.seconds(rows / whole, length)
        drafted = tokens / max(seconds + drafting, 1e-9)  # a clock may stand still
        plain = sequences / (steps * live.seconds(sequences / steps, length))
        self._ahead += _NEWS * (drafted / plain - self._ahead)
        if self._ahead < _LOSES:
            self._resting, self._left, self._drafted = True, self._wait, 0
            self._wait = min(2 * self._wait, _MOST)
        else:
            self._left, self._wait = _TRY, max(self._wait // 2, _FIRST)


class Fallback:
    """Whether sequences that share their forwards draft; one serves an engine.

    Args:
        live: what forwards take.
    """

    def __init__(self, live: LiveCosts) -> None:
        self._live = live
        self._companies: dict[tuple[int, bool], _Company] = {}

    def rests(self, sequences: int, drawn: bool) -> bool:
        """Whether the next step of so many sequences is a plain one; ``drawn``: one of them samples."""
        return self._of(sequences, drawn).rests

    def note(
        self,
        sequences: int,
        drawn: bool,
        *,
        tokens: int,
        length: int,
        drafting: float,
        rows: int | None,
        seconds: float,
    ) -> None:
        """Take note of a step of so many sequences after about ``length`` tokens each.

        All else is all sequences' together: ``drafting`` are the seconds of proposing and observing; the forward had
        so many ``rows``, None where these did not go through all of it, as drafts with an entry do not, and took so
        many ``seconds``.
        """
        self._of(sequences, drawn).note(self._live, length, sequences, tokens, drafting, rows, seconds)

    def _of(self, sequences: int, drawn: bool) -> _Company:
        """The company of about so many sequences, as far as companies are alike."""
        kind = sequences.bit_length(), drawn
        company = self._companies.get(kind)
        if company is None:
            company = self._companies[kind] = _Company()
        return company
