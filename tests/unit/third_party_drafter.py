"""A drafter that bets on a shout: the last token again and again."""

from __future__ import annotations

from dataclasses import dataclass

from specdec import Context, Draft, DrafterBase, Observation


@dataclass(frozen=True, kw_only=True)
class ShoutConfig:
    """Options.

    Attributes:
        times: how often the last token is proposed.
    """

    times: int = 3


class Shout(DrafterBase):
    """Proposes the last token, over and over."""

    name = "shout"
    Config = ShoutConfig

    def start(self, context: Context) -> ShoutSession:
        return ShoutSession(context, self.config.times)


class ShoutSession:
    def __init__(self, context: Context, times: int) -> None:
        self.context, self.times = context, times

    def propose(self, row_budget: int) -> Draft:
        times = min(self.times, row_budget - 1, self.context.remaining - 1)
        return Draft.chain([self.context.root] * (1 + times))

    def observe(self, seen: Observation) -> None:
        pass  # nothing to learn
