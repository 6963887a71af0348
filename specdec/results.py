"""Results of a generation: text, tokens, the reason why it ended, and statistics of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Chunk", "Generation", "Seconds", "Statistics", "Step", "StepTrace", "TokenLogprobs"]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The tree of a step, and its outcome.

    Attributes:
        tokens, parents: tokens and parents of the tree's rows, as in :class:`specdec.step.tree.Draft`.
        sources: per row the drafter that proposed it, the first one where several are merged; ``target`` for the root.
        path: the accepted rows, the root first.
        token_sources: per emitted token the source of its row, or ``target`` for the bonus token.
        seconds: time from the start of the text's first step to the end of this one.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    sources: Sequence[str]
    path: Sequence[int]
    token_sources: Sequence[str]
    seconds: float


@dataclass(slots=True)
class Step:
    """One decoding step: ``tokens`` emitted (bonus last), ``rows`` of the target's forward, drafter's name.

    ``trace`` is set if the generation was started with ``trace=True``. ``first_time``: a CUDA graph was recorded or a
    kernel compiled meanwhile, so the step took longer than those after it, and is not compared with them.
    """

    index: int
    tokens: Sequence[int]
    rows: int
    drafter: str
    trace: StepTrace | None = None
    first_time: bool = field(default=False, compare=False)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted; the bonus token is not counted."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of an emitted token under the target, before logits processors, and the likeliest tokens.

    ``top`` holds pairs (token, log-probability), best first, as many as ``logprobs`` asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Seconds:
    """Wall-clock seconds by phase.

    ``prefill`` is everything before the first step: tokenizing, making the cache and the drafting session, and running
    the prompt. The others are parts of the steps: ``draft`` is the drafting session's time, passes of its models
    included, ``target`` the forwards' time, and ``rest`` what is left: verification, commits and the loop. In a batch
    the time of a forward is divided among sequences by their rows, the time of common passes and the rest equally.

    On a GPU the prefill is waited for. A step is waited for once, when its numbers are read: ``target`` is the time to
    launch the forward, and the rest of the device's time is part of ``rest``.
    """

    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    rest: float = 0.0

    @property
    def decode(self) -> float:
        """All but the prefill."""
        return self.draft + self.target + self.rest


@dataclass(slots=True)
class Statistics:
    """Counts of one generation.

    Attributes:
        acceptance_lengths: tokens emitted by each step, the bonus token counted.
        rows: rows of each step's target forward.
        prompt_tokens: tokens of the prompt.
        reused_tokens: tokens of the prompt whose keys and values came from a prefix cache.
        lossy: whether the acceptance rule may have changed the output distribution.
        activations: ``int8`` if rows were rounded to 8 bits before quantised weights, which gives another model's text;
            else None.
        accepted_prediction_tokens: length of the longest common subsequence of the ``prediction`` and the text. It
            measures the prediction, not the steps, and is counted when the result is made.
        rejected_prediction_tokens: the prediction's other tokens, also those after the text's end.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    lossy: bool = False
    activations: str | None = None
    acceptance_lengths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def steps(self) -> int:
        """Target forwards, the prefill not counted."""
        return len(self.acceptance_lengths)

    @property
    def new_tokens(self) -> int:
        return sum(self.acceptance_lengths)

    @property
    def tokens_per_step(self) -> float:
        """Mean acceptance length, also called compression ratio or MAT."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens by decoding time; the prefill is not counted."""
        return self.new_tokens / self.seconds.decode if self.seconds.decode else 0.0

    @property
    def rows_per_step(self) -> float:
        return sum(self.rows) / self.steps if self.steps else 0.0

    def acceptance(self) -> dict[str, Any]:
        """Acceptance of drafts under vLLM's names, so that figures can be compared.

        A draft is a step that verified more than the root, and its tokens are its rows below the root. The mean counts
        the bonus token; entry k of ``num_accepted_tokens_per_pos`` is the number of drafts with more than k accepted.
        """
        pairs = zip(self.acceptance_lengths, self.rows, strict=True)
        drafts = [(length - 1, rows - 1) for length, rows in pairs if rows > 1]
        accepted = [length for length, _ in drafts]
        return {
            "steps": self.steps,
            "num_drafts": len(drafts),
            "num_draft_tokens": sum(rows for _, rows in drafts),
            "num_accepted_tokens": sum(accepted),
            "num_accepted_tokens_per_pos": [sum(k < one for one in accepted) for k in range(max(accepted, default=0))],
            "mean_acceptance_length": 1 + sum(accepted) / len(drafts) if drafts else 1.0,
            "acceptance_length_histogram": dict(sorted(Counter(self.acceptance_lengths).items())),
        }


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream: the tokens of one step and the text that they complete; ``error`` as a Generation's."""

    text: str
    token_ids: Sequence[int]
    step: Step | None
    finish_reason: str | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation.

    Attributes:
        text: text of the new tokens without special tokens, cut before a stop string.
        token_ids: the new tokens, an end-of-sequence token and a stop string's included.
        finish_reason: ``eos``, ``stop`` (a stop string or criterion), ``length`` (max_new_tokens) or ``context``; in
            a batch also ``error``, and ``cancelled`` where :meth:`specdec.engine.scheduler.Scheduler.cancel` ended it.
        stats: counts and times.
        steps: the steps, for traces.
        logprobs: log-probabilities per token, if they were asked for.
        error: in a batch, why this prompt failed; the tokens before the failure are kept.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Statistics
    steps: list[Step]
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None

    @property
    def lossy(self) -> bool:
        return self.stats.lossy
