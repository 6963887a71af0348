"""Prediction: copy from a text that the answer is expected to resemble, as an editor does with the file it changes.

A caller can give this text along with the prompt (OpenAI's "predicted outputs"). The drafter follows it token by token,
and drafts what comes next in it. Where the answer departs from it, tokens were inserted, removed or replaced. The next
step has a branch for each case: go on where the answer left the prediction; go on as many tokens further as were
emitted since; and go on behind the nearest place that ends as the answer does, which a suffix automaton of the
prediction shows to exist (:mod:`drafters.suffix_automaton`).

It works beside another drafter: as one more part of a drafter that merges parts; otherwise before the other one,
whenever the prediction has a proposal. Drafts that are sampled, or that enter the model behind its first layers, cannot
be merged; and in a copied text, the prediction's tokens are more likely than other drafters' tokens.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from drafters.suffix_automaton import Cursor, SuffixAutomaton
from drafters.union.merge import Merged, Record
from specdec.costs.policy import Patience
from specdec.drafter import (
    BatchedSession,
    Context,
    DeviceStep,
    Drafter,
    DrafterBase,
    DrafterWrapper,
    DraftSession,
    MergingSession,
    Observation,
    ReadbackSession,
    RestingSession,
)
from specdec.drafting.registry import make_drafter
from specdec.drafting.sessions import proposing, session_of
from specdec.errors import ConfigError
from specdec.settings.parsing import check_positive
from specdec.step import device_copies
from specdec.step.forward_passes import Passes
from specdec.step.tree import Draft, DraftBuilder, Hints
from specdec.target import Target

__all__ = ["PredictedText", "Prediction", "PredictionConfig"]

_NEAR = 64  # occurrences of a token that are searched for the nearest place that ends as the answer does
_WHOLE = 64  # tokens that count as agreed at the answer's begin
_FIRM = 8  # agreed tokens in a row that make the place certain; shorter runs occur in many places
_BRANCH_TOKENS = 4  # tokens of each branch in the steps after the answer has left the prediction
_LONG = 16  # tokens since the answer left the prediction, after which positions no longer correspond


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionConfig:
    """Options.

    Attributes:
        max_tokens: most tokens to propose from the prediction, all branches together.
        factor: tokens to propose for each agreed token since the answer came back to the prediction. At the answer's
            begin, and until it leaves the prediction, the number is ``max_tokens``.
        drafter: the drafter that works beside it; an engine passes its own.
    """

    max_tokens: int = 32
    factor: float = 4.0
    drafter: Any = "none"

    def __post_init__(self) -> None:
        check_positive("prediction.", max_tokens=self.max_tokens)
        if not 0 < self.factor < math.inf:
            raise ConfigError(f"prediction.factor is {self.factor}; it must be more than 0, and finite")


class PredictedText:
    """A predicted text, and the answer's place in it.

    Attributes:
        place: index of the token that is expected next; while the answer is away, of the token where it left.
        agreed: number of the answer's tokens before ``place`` that agree in a row; 0 while it is away.
        away: number of the answer's tokens since it left the prediction; 0 while it follows.
        left: the latest place where the answer left after it had certainly followed. The place where it came back later
            may be just a frequent phrase.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.place, self.agreed, self.away, self.left = 0, _WHOLE, 0, 0
        self._where: dict[int, list[int]] = {}
        for place, token in enumerate(self.tokens):
            self._where.setdefault(token, []).append(place)
        self._cursor: Cursor | None = None  # made when the answer first leaves the prediction
        self._answer: list[int] = []

    def add(self, token: int) -> None:
        """Add the next token of the answer."""
        self._answer.append(token)
        if self._cursor is not None:
            self._cursor.add(token)
        if not self.away and self.place < len(self.tokens) and self.tokens[self.place] == token:
            self.place += 1
            self.agreed += 1
            return
        if self._cursor is None:
            self._cursor = Cursor(SuffixAutomaton(self.tokens))
            for one in self._answer:
                self._cursor.add(one)
        if self.agreed >= _FIRM:
            self.left = self.place
        self.away, self.agreed = self.away + 1, 0
        if self.away > 1:  # a single token can occur anywhere, and tokens before that belong to the place it left
            end, length = self.found()
            if length > 1:
                self.place, self.agreed, self.away = end, length, 0

    def found(self) -> tuple[int, int]:
        """The nearest place that ends as the answer does: the index behind it, and the number of agreeing tokens.

        The nearest place is the first one behind ``left``, or else the last one before it. Only tokens since the answer
        left the prediction count, as earlier ones agree with the place it left.
        """
        assert self._cursor is not None
        end, length = self._cursor.match
        length = min(length, self.away)
        if not length:
            return end, 0
        suffix, places = self._answer[-length:], self._where[self._answer[-1]]
        first = bisect_left(places, self.left)
        for place in (*islice(places, first, first + _NEAR), *reversed(places[max(0, first - _NEAR) : first])):
            if place + 1 >= length and self.tokens[place + 1 - length : place + 1] == suffix:
                return place + 1, length
        return end, length

    def branches(self) -> list[int]:
        """The places where the answer, which is away, may go on, the likeliest first."""
        end, length = self.found()
        places = [end] if length > 1 or (length and end > self.left) else []  # tokens were removed or moved
        if self.away <= _LONG:
            places += [self.place + self.away, self.place, self.left]  # replaced, or inserted
        return [place for place in dict.fromkeys(places) if place < len(self.tokens)]


class Prediction(DrafterBase):
    """Copies from the predicted text; works alone where no other drafter is named."""

    name = "prediction"
    draws = False
    Config = PredictionConfig
    needs_observe = False

    @classmethod
    def build(cls, config: PredictionConfig, target: Target) -> Any:
        """The prediction as the first part of a drafter that merges, or before any other drafter, or alone.

        Raises:
            ConfigError: the other drafter is unknown, or has a wrong option.
        """
        own, other = cls(config), make_drafter(config.drafter, target)
        if isinstance(other, Merged):
            return _with_part(other, own)
        return PredictionFirst(own, other) if other.proposes else own

    def start(self, context: Context) -> PredictionSession:
        return PredictionSession(self.config, context)


def _with_part(merged: Merged, part: Prediction) -> Merged:
    """The same drafter with one more part, the first; records of the other parts are shared."""
    made = copy.copy(merged)
    made.parts = [part, *merged.parts]
    made.record = Record(made.parts, merged.config.memory)
    made.record.bandits[1:] = merged.record.bandits
    return made


class PredictionSession:
    def __init__(self, config: PredictionConfig, context: Context) -> None:
        self._config, self._context = config, context
        self._text = PredictedText(context.prediction)
        self._read = context.prompt_length

    @property
    def follows(self) -> bool:
        """Whether the answer's place in the prediction is certain."""
        return self._text.agreed >= _FIRM

    def propose(self, row_budget: int) -> Draft:
        config, context, text = self._config, self._context, self._text
        for token in context.tokens[self._read :]:
            text.add(token)
        self._read = len(context.tokens)
        most = min(config.max_tokens, context.remaining - 1, row_budget - 1)
        if most < 1 or not text.tokens:
            return Draft.chain([context.root])
        if not text.away:
            size = min(most, max(1, int(config.factor * text.agreed)))
            path = text.tokens[text.place : text.place + size]
            return Draft.chain([context.root, *path], hints=Hints(match_length=text.agreed))
        builder = DraftBuilder(context.root)
        for place in text.branches():
            size = min(_BRANCH_TOKENS, most)
            builder.add_path(text.tokens[place : place + size], row_budget=most + 1)
        return builder.build(hints=Hints(match_length=1))

    def observe(self, seen: Observation) -> None:
        pass  # the text is read from the context


class PredictionFirst(DrafterWrapper):
    """The prediction where it has a proposal, else the inner drafter.

    While the answer is away, the prediction proposes as long as that helps, and now and then later.

    The inner session observes a step of the prediction as one in which it rested: it gets hidden states, if it needs
    any; a drafter that does not need its own drafts back gets the whole observation.
    """

    def __init__(self, prediction: Prediction, inner: Drafter) -> None:
        super().__init__(inner)
        self.prediction = prediction

    def start(self, context: Context) -> DraftSession:
        own, other = self.prediction.start(context), session_of(self.inner, context)
        kind = PredictionFirstReading if isinstance(other, ReadbackSession) else PredictionFirstSession
        return kind(own, other, self.inner, context)


class PredictionFirstSession(BatchedSession):
    def __init__(self, own: PredictionSession, other: DraftSession, inner: Drafter, context: Context) -> None:
        self._own, self._other, self._inner, self._context = own, other, inner, context
        self._is_own = False  # whether the prediction made the latest draft
        self._size = 1  # rows of that draft
        self._length = 0  # of the text before that draft
        if isinstance(other, RestingSession):
            self.missed = other.missed
        self._patience, self._pays = Patience(1, 32), True

    def passes(self, row_budget: int) -> Passes[Draft]:
        draft, length = self._own.propose(row_budget), len(self._context.tokens)
        if self._is_own:
            self._pays = length > self._length + 1
            if self._pays:
                self._patience.paid()
        self._length = length
        self._is_own = len(draft) > 1 and (self._own.follows or self._pays or self._patience.due())
        if not self._is_own:
            draft = yield from proposing(self._other, row_budget, self._inner.name, self._context.target)
        self._size = len(draft)
        return draft

    def sources(self) -> Sequence[str]:
        """The source of each row in the latest draft: the prediction, or the inner session's sources."""
        if self._is_own:
            return [Prediction.name] * self._size
        other = self._other
        return other.sources() if isinstance(other, MergingSession) else [self._inner.name] * self._size

    def observe(self, seen: Observation) -> None:
        other, inner, draft = self._other, self._inner, seen.draft
        if draft is None or not self._is_own or (inner.needs_observe and not inner.needs_draft):
            other.observe(seen)
        elif inner.taps:
            path = [*seen.path]
            hidden = {layer: device_copies.pick(rows, path) for layer, rows in seen.taps.items()}  # [n, D]
            other.observe(Observation(None, range(len(path)), [draft.tokens[row] for row in path], taps=hidden))


class PredictionFirstReading(PredictionFirstSession):
    """The same around an inner session that reads values back in every step."""

    def readback(self, step: DeviceStep) -> torch.Tensor | None:
        other = self._other
        return other.readback(step) if isinstance(other, ReadbackSession) else None
