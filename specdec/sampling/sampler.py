"""Sampler: from a row's logits to a token, by processors on the row's own prefix, then the argmax or a draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from specdec.errors import NumericalError
from specdec.sampling.grammar import Grammar, States
from specdec.sampling.noise import Noise, inverse_bits
from specdec.sampling.processors import FREE, check_scores, judged, masked, name_of, takes_rows
from specdec.settings.sampling_params import SamplingParams
from specdec.step.step_io import Draws
from specdec.step.step_output import StepOutput, extremes, no_distribution

__all__ = ["Sampler"]


class Sampler:
    """Turns a row's logits into a token or a distribution; processors see the row's own prefix.

    Args:
        params: temperature and the rest.
        tokens: the committed text, which grows; its last token is the root.
        vocab_size: V.
        device: device of the logits.
        processors: further processors in transformers' form, or a :class:`specdec.sampling.grammar.Grammar`, applied
            before those of ``params``.
        sample: draw (True) or take the largest (False); None follows the temperature.

    Attributes:
        greedy: whether its token after a row is the argmax of the row's logits, whatever the text.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: list[int],
        vocab_size: int,
        device: torch.device,
        processors: Sequence[Any] = (),
        sample: bool | None = None,
    ) -> None:
        self.params = params
        self.sample = params.temperature > 0 if sample is None else sample
        self.noise = Noise(params.seed, vocab_size, device)
        begun = [States(one, tokens) if isinstance(one, Grammar) else one for one in processors]
        self.processors: list[Any] = [*begun, *params.processors()]
        self.greedy = not (self.sample or self.processors)
        self._all_free = all(type(p) in FREE for p in self.processors)
        self.takes_together = all(map(takes_rows, self.processors))
        # Processors that are called row by row, and a grammar's states, need tokens on the host.
        self.reads_drafts = not self.takes_together or any(isinstance(p, States) for p in self.processors)
        last: Any = self.processors[-1] if self.processors else None
        plain = type(last) is TopPLogitsWarper and last.min_tokens_to_keep == 1 and last.filter_value == -math.inf
        self._top_p: float | None = last.top_p if plain and not self.noise.waits else None
        only = type(last) is TemperatureLogitsWarper and len(self.processors) == 1
        self._temperature: float | None = last.temperature if only else None if self.processors else 1.0
        self.tokens = tokens
        self._prefix = torch.zeros(1, 256, dtype=torch.long, device=device)
        self._filled = 0

    @property
    def unread(self) -> list[int] | None:
        """Tokens of the text that are not on the device yet; None where no processor reads the text."""
        return None if self._all_free else self.tokens[self._filled :]

    def together(
        self,
        logits: torch.Tensor,
        paths: torch.Tensor,
        unread: torch.Tensor | None = None,
        depths: Sequence[int] = (),
        path_of: Callable[[int], Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Logits [R, V] after all processors, for a sampler that ``takes_together``.

        Args:
            logits: [R, V], raw.
            paths: int64 [R, D], each row's tokens below the root, padded with tokens of its text.
            unread: the tokens of :attr:`unread`, if they are on the device already.
            depths: depths of the rows, for processors beside those of ``params``.
            path_of: returns a row's tokens below the root; needed if the sampler ``reads_drafts``.
        """
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        ids = (
            self._prefix[:, :0]
            if self._all_free
            else torch.cat((self._ids((), unread).expand(len(logits), -1), paths), 1)
        )
        lengths = [len(self.tokens) + depth for depth in depths]
        for processor in self.processors:
            if isinstance(processor, States):
                assert path_of is not None
                logits = masked(processor, self.tokens, [path_of(row) for row in range(len(logits))], logits)
            else:
                logits = judged(processor, ids, logits, lengths)
        return logits

    @property
    def draws(self) -> Draws | None:
        """What its draws follow from, if they depend on the temperature and the logits only; else None."""
        if not self.sample or self._temperature is None:
            return None
        return Draws((self.noise.start,), (self._temperature,))

    @property
    def draws_there(self) -> bool:
        """Whether a device's kernels can make them."""
        return self.draws is not None and inverse_bits(self._temperature or 0.0) != 0

    def token(self, output: StepOutput, row: int, path: Sequence[int]) -> int:
        """The target's token after ``path`` (tokens below the root), from the logits of ``row``."""
        if self.greedy:
            return output.argmax(row)
        try:
            own = output.decided(row)
            if own is not None:
                return own
            if self.sample:
                return self._drawn(output, row, path)
        except NumericalError:
            raise self._unsound(output, row, path) from None
        value, token = self.processed(output, row, path).max(-1)
        if not math.isfinite(value.item()):
            raise self._unsound(output, row, path)
        return int(token)

    def _unsound(self, output: StepOutput, row: int, path: Sequence[int]) -> NumericalError:
        """The error for a row whose logits, or whose scores after a processor, are no distribution."""
        row_scores = output.at(row)
        name: str | None = None
        if math.isfinite(float(row_scores.max())):
            for count, processor in enumerate(self.processors, 1):
                processed = self.processed(output, row, path, self.processors[:count])
                if math.isfinite(float(processed.max())):
                    name = None
                elif name is None:
                    row_scores, name = processed, name_of(processor)
        if name is None:
            return no_distribution(output.at(row))
        return NumericalError(
            f"the scores after the logits processor {name} are no distribution: {extremes(row_scores)}, and the "
            "model's own logits are finite; it must leave at least one token a finite score, and none NaN or +inf"
        )

    def _drawn(self, output: StepOutput, row: int, path: Sequence[int]) -> int:
        """A token drawn by the target's noise.

        Top-p sorts the vocabulary, which may take longer than a forward. Where it is the last processor, tokens are
        drawn without it until one is drawn that it surely keeps; it is called only where rounding decides.
        """
        position = len(self.tokens) + len(path)
        if self._temperature is not None:
            token = output.draw(row, self.noise.key(position), self._temperature)
            if token is not None:
                return token
        if self._top_p is None:
            return self.noise.winner(self.processed(output, row, path), position)
        logits = self.processed(output, row, path, self.processors[:-1])
        shares = torch.softmax(logits.double(), -1)
        rounding = len(shares) * 2.0**-24  # of a sum of so many numbers in float32, whose total is 1
        left = 1 - self._top_p  # the least likely tokens are left out while their sum is at most this
        near = (shares > max(0.0, (left - rounding) / len(shares))).nonzero()[:, 0]  # all others are surely left out
        if not near.numel():
            raise no_distribution(logits)
        while True:
            token = self.noise.winner(logits, position, near)
            value = logits[token]
            if float(shares.dot((logits < value).double()) + shares[token]) - rounding > left:
                return token
            if float(shares.dot((logits <= value).double())) + rounding > left:
                return self.noise.winner(self.processors[-1](self._prefix[:, :0], logits[None])[0], position)
            near = near[logits[near] > value]

    def probabilities(self, output: StepOutput, row: int, path: Sequence[int]) -> torch.Tensor:
        """[V] float64 probabilities of the token after ``path``; NaN where logits are no distribution (not checked)."""
        return torch.softmax(self.processed(output, row, path).double(), -1)

    def distribution(self, output: StepOutput, row: int, path: Sequence[int]) -> torch.Tensor:
        """As :meth:`probabilities`, checked.

        Raises:
            NumericalError: the logits are no distribution.
        """
        probabilities = self.probabilities(output, row, path)
        if torch.isnan(probabilities).any():
            raise self._unsound(output, row, path)
        return probabilities

    def processed(
        self, output: StepOutput, row: int, path: Sequence[int], processors: Sequence[Any] | None = None
    ) -> torch.Tensor:
        """[V] logits of ``row`` after the processors, for the text followed by ``path``; float32 or float64.

        ``processors``: a part of the sampler's; None for all.
        """
        if output.processed is not None and processors is None:
            return output.processed[output.place(row)]
        place = output.place(row)
        logits = output.given[place : place + 1]
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        if not self._all_free:
            logits = logits.clone()  # processors may write in place, and the drafter reads the raw logits
        ids = self._ids(path)
        for processor in self.processors if processors is None else processors:
            unprocessed = logits
            if not isinstance(processor, States):
                logits = processor(ids, logits)
            elif self.noise.waits:
                logits = masked(processor, self.tokens, [path], logits)
            else:
                logits = processor.process(self.tokens, path, logits)
            if not self._all_free:
                check_scores(processor, logits, unprocessed.shape)
        return logits[0]

    def _ids(self, path: Sequence[int], unread: torch.Tensor | None = None) -> torch.Tensor:
        """[1, n] the committed text and the path; only tokens that are new since the last call are written."""
        if self._all_free:
            return self._prefix[:, :0]
        known, needed = len(self.tokens), len(self.tokens) + len(path)
        if needed > self._prefix.shape[1]:
            grown = self._prefix.new_zeros(1, 2 * needed)
            grown[:, : self._filled] = self._prefix[:, : self._filled]
            self._prefix = grown
        new = [*self.tokens[self._filled :], *path]
        if new:
            there = torch.tensor(new, device=self._prefix.device) if unread is None else unread
            self._prefix[0, self._filled : needed] = there
        self._filled = known  # the path's tokens are scratch
        return self._prefix[:, :needed]
