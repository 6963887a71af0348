"""Audit: every answer compared with plain decoding, token by token.

Where an answer differs, the logits after the common text are computed again by one forward of the unmodified model, and
the two tokens' scores are compared. Scores that differ by less than rounding are a tie that kernels may break either
way. A larger gap is a bug of the system or of plain decoding; the new logits show which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from specdec.bench.own_model import own_model
from specdec.bench.plan import BASELINE
from specdec.bench.records import Record, repeats_of
from specdec.engine.questions import QuestionId
from specdec.errors import ConfigError, shown
from specdec.sampling.sampler import Sampler
from specdec.settings.sampling_params import SamplingParams
from specdec.step.step_output import StepOutput
from specdec.target import Target

__all__ = ["Audit", "Divergence", "audit", "rounding_bound"]

# Two kernels' logits differ by a few units in the last place of the largest logit; measured, with a margin.
# Transformers computes some softmaxes and norms in float32 for every dtype, so float64 gets float32's bound.
_UNITS = {torch.float64: 64.0, torch.float32: 64.0, torch.float16: 8.0, torch.bfloat16: 4.0}

BUG, ROUNDING = "BUG", "rounding"


def rounding_bound(dtype: torch.dtype, scale: float) -> float:
    """The largest gap of two logits that rounding can cause, where the largest logit has magnitude ``scale``."""
    precision = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    return _UNITS[dtype] * precision * max(scale, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference of an answer from plain decoding's.

    Attributes:
        system, question_id, repeat, turn, position: the place; ``position`` counts new tokens from 0.
        expected, found: plain decoding's token and the system's; None if the text had ended.
        gap: difference of the two best scores; ``between``: difference of the two tokens' scores. Scores are logits,
            and with a temperature the processed logits plus the noise of that position.
        bound: the largest gap that rounding explains at this dtype.
        dtype: dtype of the model.
        verdict: ``rounding`` or ``BUG``.
        culprit: the system that differs from the new logits, if the verdict is BUG.
    """

    system: str
    question_id: QuestionId
    repeat: int
    turn: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None
    between: float | None
    bound: float | None
    dtype: str
    verdict: str
    culprit: str | None = None

    def __str__(self) -> str:
        place = f"{self.system}, question {self.question_id}, turn {self.turn + 1}, repeat {self.repeat + 1}"
        if self.gap is None:
            return f"{self.verdict}: {place}: one text ends at token {self.position}, and the other goes on"
        return (
            f"{self.verdict}: {place}: token {self.position} is {self.found}, plain decoding's {self.expected}; their "
            f"scores are {self.between:.3g} apart, the best two {self.gap:.3g}; rounding in {self.dtype} is below "
            f"{self.bound:.3g}"
        )


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The outcomes of one system's answers; ``uncompared`` is the reason why its tokens can differ, or empty.

    ``answers`` are those that plain decoding's were there for; ``failed`` ended with an error.
    """

    answers: int = 0
    identical: int = 0
    failed: int = 0
    uncompared: str | None = None
    divergences: list[Divergence]

    @property
    def bugs(self) -> int:
        return sum(d.verdict == BUG for d in self.divergences)

    @property
    def brief(self) -> str:
        """One word for a table."""
        if self.bugs:
            return BUG
        if self.uncompared:
            return "other"
        return "nothing" if not self.answers else ROUNDING if self.divergences else "same"

    def __str__(self) -> str:
        if self.uncompared:
            return f"not compared: {self.uncompared}"
        if self.answers and self.identical == self.answers and not self.failed:
            return "identical"
        rounding = len(self.divergences) - self.bugs
        parts = [f"{self.identical} of {self.answers} identical" if self.answers else "nothing compared"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{rounding} apart by rounding"] if rounding else []
        parts += [f"{self.bugs} BUGS"] if self.bugs else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Audit:
    """All systems' verdicts.

    Attributes:
        compared: answers that were compared with another one.
        passed: False where a system of ours has a bug, or no answer that could be compared.
    """

    systems: dict[str, Verdict]
    ours: frozenset[str]
    compared: int

    @property
    def bugs(self) -> list[Divergence]:
        """The bugs of this package: of its drafters, or of plain decoding in any comparison."""
        return [
            divergence
            for verdict in self.systems.values()
            for divergence in verdict.divergences
            if divergence.verdict == BUG and divergence.culprit in self.ours
        ]

    @property
    def passed(self) -> bool:
        kept = (self.systems[label] for label in self.ours)
        return not self.bugs and all(verdict.answers or verdict.uncompared for verdict in kept)

    def __str__(self) -> str:
        failed = sum(verdict.failed for verdict in self.systems.values())
        return f"{self.compared} answers were compared with plain decoding's, {failed} failed"


def audit(
    records: Sequence[Record],
    systems: Mapping[str, Mapping[str, Any]],
    target: Target,
    sampling: SamplingParams,
) -> Audit:
    """Compare all answers.

    Args:
        records: the run's answers.
        systems: the manifest's systems: label -> ``ours``, ``lossy``, ``comparable``.
        target: the run's model.
        sampling: the run's sampling parameters.

    Raises:
        ConfigError: answers are missing, or not of this model.
    """
    _check_complete(records, systems)
    _check_tokens(records, target.vocab_size)
    answers = repeats_of(records)
    verdicts: dict[str, Verdict] = {}
    compared = 0
    for label, about in systems.items():
        verdict = Verdict(divergences=[], uncompared=_excuse(about, sampling))
        verdict.failed = sum(record.system == label and record.error is not None for record in records)
        for (system, question), repeats in answers.items():
            plain = answers.get((BASELINE, question))
            if system != label or plain is None:
                continue
            for record in repeats:
                verdict.answers += 1
                compared += not verdict.uncompared and record is not plain[0]
                divergence = None if verdict.uncompared else _first_divergence(record, plain[0], target, sampling)
                if divergence is not None:
                    verdict.divergences.append(divergence)
                else:
                    verdict.identical += not verdict.uncompared
        verdicts[label] = verdict
    return Audit(verdicts, frozenset(label for label, about in systems.items() if about["ours"]), compared)


def _excuse(about: Mapping[str, Any], sampling: SamplingParams) -> str | None:
    if about["lossy"]:
        return "lossy: it may change the distribution, and was asked to"
    if about["comparable"]:
        return None
    if about["ours"]:
        return f"acceptance {sampling.acceptance!r} keeps the distribution, not the tokens of a seed"
    return f"its {'random numbers' if sampling.temperature > 0 else 'kernels'} are its own"


def _check_complete(records: Sequence[Record], systems: Mapping[str, Any]) -> None:
    if not records:
        raise ConfigError(
            "the run has no answers, so there is nothing to compare; run `specdec bench` with the same options and "
            "--out again, and it goes on where it stopped"
        )
    keys = {(record.question_id, record.repeat) for record in records}
    there = {record.key for record in records}
    for label in systems:
        missing = [(question, repeat) for question, repeat in keys if (question, label, repeat) not in there]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(keys)} answers of {label!r} are missing, such as question {missing[0][0]}; "
                "run `specdec bench` with the same options and --out again, and it goes on where it stopped"
            )


def _check_tokens(records: Sequence[Record], vocab_size: int) -> None:
    for record in records:
        tokens = [token for turn in record.turns for token in (*turn.prompt_ids, *turn.token_ids)]
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ConfigError(
                f"the answer of {shown(record.system)} to question {shown(record.question_id)} holds tokens from "
                f"{shown(min(tokens))} to {shown(max(tokens))}, and the model has {vocab_size}; it is another model's: "
                "delete the line, and the run answers that question again"
            )


def _first_divergence(record: Record, plain: Record, target: Target, sampling: SamplingParams) -> Divergence | None:
    if len(record.turns) != len(plain.turns):
        raise ConfigError(
            f"{record.system!r} answered {len(record.turns)} turns of question {record.question_id}, {BASELINE!r} "
            f"{len(plain.turns)}; delete both lines, and the run answers that question again"
        )
    # Up to the first difference, answers and therefore prompts are equal.
    turns = enumerate(zip(record.turns, plain.turns, strict=True))
    differing = [(number, mine, base) for number, (mine, base) in turns if mine.token_ids != base.token_ids]
    if not differing:
        return None
    number, mine, base = differing[0]
    both = enumerate(zip_longest(mine.token_ids, base.token_ids))
    position, (found, expected) = next((place, pair) for place, pair in both if pair[0] != pair[1])
    gap = between = bound = None
    verdict = BUG
    culprit: str | None = record.system
    if found is not None and expected is not None:
        text = [*base.prompt_ids, *base.token_ids[:position]]
        scores, scale = _fresh_scores(text, target, sampling)
        best = torch.topk(scores, 2).values
        gap, between = float(best[0] - best[1]), abs(float(scores[found] - scores[expected]))
        bound = rounding_bound(target.dtype, scale) / (sampling.temperature or 1.0)
        if float(best[0] - min(scores[found], scores[expected])) <= bound:
            verdict, culprit = ROUNDING, None
        elif scores[expected] < scores[found]:
            culprit = BASELINE
    return Divergence(
        system=record.system,
        question_id=record.question_id,
        repeat=record.repeat,
        turn=number,
        position=position,
        expected=expected,
        found=found,
        gap=gap,
        between=between,
        bound=bound,
        dtype=str(target.dtype).removeprefix("torch."),
        verdict=verdict,
        culprit=culprit,
    )


def _fresh_scores(text: Sequence[int], target: Target, sampling: SamplingParams) -> tuple[torch.Tensor, float]:
    """[V] scores after ``text`` by the model's own forward, and the magnitude of the largest logit.

    The token is their argmax: logits for greedy decoding, else processed logits with the position's noise.
    """
    ids = torch.tensor([list(text)], device=target.device)
    with torch.inference_mode():
        output = own_model(target)(ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)
        logits = output.logits[:, -1]
        scale = float(logits.abs().max())
        sampler = Sampler(sampling, list(text), target.vocab_size, logits.device)
        scores = sampler.processed(StepOutput(logits), 0, ()).double()
        if sampler.sample:
            scores = scores + sampler.noise.gumbel(len(text))
    return scores, scale
