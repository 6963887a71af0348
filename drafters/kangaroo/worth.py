"""What Kangaroo's guesses are worth: the tokens that pay for their rows, and those behind which another guess pays."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from drafters.shared.calibration import Calibration
from drafters.shared.ranks import Ranks
from specdec.costs.curve import pass_price
from specdec.costs.prices import Prices
from specdec.drafter import Context

__all__ = ["Worth"]

_ACCEPTED, _GUESSES = 0.6, 4.0  # prior share of accepted guesses, and its weight in guesses
_RIGHT, _PROMISED = 0.9, 8.0  # likeliest tokens that are right for one that is promised, and the promises it counts as


class Worth:
    """Of one text's rounds; prices are in plain steps.

    Args:
        drafter: a :class:`drafters.kangaroo.drafter.Kangaroo`.
        wide: whether one guess is behind several rows.

    Attributes:
        shallow_price, guess_price: of a shallow pass of one row, and of a guess.
        accepted: guesses that were accepted, where all above was right.
    """

    def __init__(self, drafter: Any, context: Context, *, wide: bool) -> None:
        costs, length = context.costs, context.prompt_length
        self.shallow_price, self.guess_price = (
            pass_price(weights, context.target, costs, length)
            for weights in (drafter.shallow_weights, drafter.guess_weights)
        )
        self._prices, self._length, self._wide = Prices(costs), length, wide
        self._deep: float = 1 - drafter.exit_layer / context.target.num_layers
        self.accepted = Calibration(_ACCEPTED * _GUESSES, _GUESSES)
        self._likeliest = Calibration(_RIGHT * _PROMISED, _PROMISED)
        self._ranks = Ranks(min(drafter.branch, context.max_rows), _ACCEPTED, _GUESSES)  # of these guesses

    def step(self, rows: int) -> float:
        """The price of a step of some rows."""
        return self._prices.step(self._length, rows)

    def learn(self, chance: float, chosen: Sequence[int], token: int) -> None:
        """That ``token`` came where these were chosen, likeliest first; ``chance``: what the first was given."""
        self._ranks.learn(chosen, token)
        self.accepted.learn(1, token in chosen)
        self._likeliest.learn(chance, chosen[:1] == [token])

    def unread(self, reached: float, rows: int, most: int) -> tuple[int, list[float], float]:
        """How many unread tokens of a guess are verified, :meth:`_onward` of the first, and the first one's chance."""
        chances = self._ranks.shares[:most]
        hopes = self._hopes(reached, chances)
        # With no token nothing would be learned; the row policy may still decide to draft nothing.
        count = max(self._paying(hopes, rows), 1)
        return count, self._onward(hopes[:1], rows + count), chances[0]

    def chosen(
        self,
        nodes: Sequence[int],
        reached: Sequence[float],
        guesses: Sequence[Sequence[tuple[int, float]]],
        rows: int,
        most: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """The guesses behind some rows that pay, the likeliest to be reached first; a guess is a number and its chance.

        Returns:
            Per token its parent row and its number; and :meth:`_onward`.
        """
        candidates = [
            (hope, node, number)
            for node, reach, guess in zip(nodes, reached, guesses, strict=True)
            for (number, _), hope in zip(guess, self._hopes(reach, [chance for _, chance in guess]), strict=True)
        ]
        if len(nodes) > 1:
            candidates.sort(key=itemgetter(0), reverse=True)
        hopes = [hope for hope, _, _ in candidates[:most]]
        count = self._paying(hopes, rows)
        onward = self._onward(hopes[: count if self._wide else min(count, 1)], rows + count)
        return [node for _, node, _ in candidates[:count]], [number for _, _, number in candidates[:count]], onward

    def _hopes(self, reached: float, chances: Sequence[float]) -> list[float]:
        """Probabilities to reach tokens with these chances, calibrated by earlier guesses."""
        sure = self._likeliest.share
        return [reached * min(1.0, sure * chance) for chance in chances]

    def _paying(self, hopes: Sequence[float], rows: int) -> int:
        """The number of tokens, likeliest first, with the largest net gain; ``rows``: rows of the draft so far."""
        # The first token pays for a shallow pass; the others pay only for a row in that pass.
        return self._prices.keep(hopes, self._length, base=rows, least=self._pass_price(rows))

    def _onward(self, hopes: Sequence[float], rows: int) -> list[float]:
        """The hopes of the tokens behind which another guess pays.

        The first token pays for adapter, head and a shallow pass; the others only for a row of each.
        """
        prices, length, accepted, onward = self._prices, self._length, self.accepted.share, list[float]()
        drafting = self.guess_price + self._pass_price(rows)
        for row, hope in enumerate(hopes, rows):
            if guessed := len(onward):
                drafting = self.guess_price * prices.added(length, guessed + 1, guessed)
            if prices.gain(hope * accepted, length, row + 1, base=row, drafting=drafting) <= 0:
                break
            onward.append(hope)
        return onward

    def _pass_price(self, rows: int) -> float:
        """What the first token behind ``rows`` others costs beside its row: a shallow pass, in which its row is."""
        return self.shallow_price - (1 - self._deep) * self._prices.added(self._length, rows + 1, rows)
