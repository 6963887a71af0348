"""Medusa's guesses as CUDA graphs: the heads' products, the noise of draws, and the ranking, in one launch.

Two graphs are kept: of a greedy text, and of one that draws at a temperature alone. Everything that differs from step
to step or from text to text (state, root, where the noise begins, temperature) is in memory at a fixed address.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from drafters.shared.vocabulary import coupled
from specdec.errors import SpecdecWarning, first_line
from specdec.runners.graphs import Recorder
from specdec.sampling.noise import Noise
from specdec.step.first_time import FirstTimes

__all__ = ["RecordedHeads"]


class RecordedHeads:
    """The recorded guesses of some heads.

    Args:
        recorder: keeps the graphs.
        logits: [1, heads, d] for a hidden state [1, D] and a root [1].
        ranked: what is read of logits [heads, d].
        noise: of the draft vocabulary, at any seed.
        like: [1, D] zeros, as a hidden state is.

    Attributes:
        failed: why graphs are no longer used, or None.
    """

    def __init__(
        self,
        recorder: Recorder,
        logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        ranked: Callable[[torch.Tensor], torch.Tensor],
        noise: Noise,
        like: torch.Tensor,
    ) -> None:
        self._recorder, self._logits, self._ranked, self._noise = recorder, logits, ranked, noise
        self._hidden, self._root = like, torch.zeros(1, dtype=torch.long, device=like.device)
        self._start = torch.zeros_like(self._root)
        self._temperature = torch.ones(1, dtype=torch.float64, device=like.device)
        self._graphs: dict[bool, tuple[torch.Tensor, Callable[[], None]]] = {}
        self.failed: str | None = None

    def guess(
        self, hidden: torch.Tensor, root: torch.Tensor, start: torch.Tensor | None = None, temperature: float = 1.0
    ) -> torch.Tensor | None:
        """What is read of the heads' guesses behind a state [1, D] and a root [1]; None where it cannot be recorded.

        ``start``: int64 [1], of the first head's draw (``Noise.starts_at``); None where nothing is drawn.
        """
        if self.failed is not None:
            return None
        draws = start is not None
        with self._recorder.lock, torch.no_grad():
            self._hidden.copy_(hidden)
            self._root.copy_(root)
            if start is not None:
                self._start.copy_(start)
                self._temperature.fill_(temperature)
            if draws not in self._graphs:
                try:
                    with FirstTimes.during():
                        (outcome, _), replay = self._recorder.record(lambda: (self._work(draws), {}))
                except Exception as error:  # the driver's, the allocator's and the compiler's share no class but this
                    self.failed = f"{type(error).__name__}: {first_line(error)}"
                    warnings.warn(
                        f"Medusa's heads are launched kernel by kernel, more slowly, as no CUDA graph of them can be "
                        f"recorded: {self.failed}",
                        SpecdecWarning,
                        stacklevel=2,
                    )
                    return None
                self._graphs[draws] = outcome, replay
            outcome, replay = self._graphs[draws]
            replay()
            return outcome.clone()

    def warm_up(self) -> None:
        """Record both graphs."""
        self.guess(self._hidden.clone(), self._root.clone())
        self.guess(self._hidden.clone(), self._root.clone(), self._start.clone())

    def _work(self, draws: bool) -> torch.Tensor:
        logits = self._logits(self._hidden, self._root)[0]
        if draws:
            noise = self._noise.gumbel_from(self._start, len(logits))
            logits = coupled(logits.float() / self._temperature.float(), noise, self._temperature)
        return self._ranked(logits)
