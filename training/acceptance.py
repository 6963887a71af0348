"""Acceptance on held-out text without decoding, measured in one forward for each text.

If the target itself wrote a text greedily, the tokens that a chain drafter gets accepted there *are* the text. So
features are those of drafting, and steps can be counted from two facts about each position: whether the guess is the
text's next token, and whether the drafter is sure enough to go on. The count equals the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.engine.engine import Engine
from specdec.errors import PromptError
from specdec.settings.files import append_lines, drop_unfinished, read_lines, writing
from specdec.settings.validation import AtLeast1, check_fields, read_json
from training.split import Sample, prompts_in

__all__ = ["EvalConfig", "Tally", "Written", "continued_texts", "judged_samples", "standard_error"]

_DEEPEST = 6  # CTAR(1) .. CTAR(6)
_FEW = 8  # held-out prompts; of fewer, none is spared for the report


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation, on texts that the target writes greedily.

    Attributes:
        prompts: number of prompts by which ``best/`` is chosen; as many others are for the report.
        prompt: tokens of plain text before a continuation; questions of up to so many tokens are preferred, and longer
            ones are taken whole.
        new: most new tokens of a text.
    """

    prompts: AtLeast1 = 32
    prompt: AtLeast1 = 128
    new: AtLeast1 = 96

    def __post_init__(self) -> None:
        check_fields(self, "evaluation.")


@dataclass(frozen=True, slots=True)
class Written:
    """A prompt and the target's continuation, as tokens; ``prompt`` is the prompt's length."""

    tokens: list[int]
    prompt: int


class Tally:
    """Counts over steps: of ``reached[i]`` drafts at position i with all before accepted, ``accepted[i]`` were."""

    def __init__(self, gamma: int) -> None:
        self.gamma, self.steps, self.tokens = gamma, 0, 0
        self.accepted, self.reached = [0] * gamma, [0] * gamma

    def add(self, right: Sequence[bool], trusted: Sequence[bool]) -> None:
        """Count the steps of one text of n new tokens.

        ``right[i]`` and ``trusted[i]``, n of each, describe the guess of new token i, from the feature of the token
        before it. A step drafts up to gamma tokens, ends behind the first guess that is not trusted, and never drafts
        the last token of the budget.
        """
        chains: list[list[bool]] = []
        for root in range(len(right)):
            sure = next((i for i in range(root, len(right)) if not trusted[i]), len(right))
            chains.append([*right[root : min(sure + 1, root + self.gamma)]])
        self.add_chains(chains)

    def add_chains(self, chains: Sequence[Sequence[bool]]) -> None:
        """Count the steps of one text of n new tokens, for a drafter that makes chains.

        ``chains[i]`` is the chain drafted behind new token i - 1 (for 0, behind the prompt), of up to gamma tokens:
        whether each is the text's token, given that the ones before are. The budget's last token is never drafted.
        """
        root, end = 0, len(chains)
        while root < end:
            accepted = 0
            for depth, right in enumerate(chains[root][: end - root - 1]):
                self.reached[depth] += 1
                if not right:
                    break
                self.accepted[depth] += 1
                accepted += 1
            self.steps += 1
            self.tokens += accepted + 1
            root += accepted + 1

    def figures(self) -> dict[str, float]:
        """Tokens per step, CTAR(w) (share of steps that accept w or more drafts), and acceptance by position."""
        figures = {"tokens_per_step": self.tokens / max(self.steps, 1)}
        for w in range(1, _DEEPEST + 1):
            figures[f"ctar_{w}"] = (self.accepted[w - 1] if w <= self.gamma else 0) / max(self.steps, 1)
        for place, (accepted, reached) in enumerate(zip(self.accepted, self.reached, strict=True), 1):
            figures[f"accepted_{place}"] = accepted / reached if reached else 0.0
        return figures


def judged_samples(held: Sequence[Sample], judged: EvalConfig) -> tuple[list[Sample], list[Sample]]:
    """The samples by which ``best/`` is chosen, and others that the report is about, up to ``judged.prompts`` each.

    Each prompt is taken once. With fewer than eight prompts, there are none for the report.
    """
    samples = prompts_in(held)
    fitting = [sample for sample in samples if sample.question <= judged.prompt]
    longer = sorted((s for s in samples if s.question > judged.prompt), key=lambda sample: sample.question)
    wanted = judged.prompts * (1 if len(samples) < _FEW else 2)
    count = min(wanted, len(fitting))
    taken = [fitting[number * len(fitting) // count] for number in range(count)] + longer[: wanted - count]
    return (taken, []) if len(samples) < _FEW else (taken[::2], taken[1::2])


def continued_texts(
    engine: Engine, samples: Sequence[Sample], judged: EvalConfig, kept: Path | None = None
) -> list[Written]:
    """Let the target continue the samples greedily.

    A conversation is cut before its first answer, plain text after ``judged.prompt`` tokens, or in its middle if it is
    short. A question that is longer than the target's context is left out.

    Args:
        kept: file of JSON lines to which each text is added; those in it are not written anew.
    """
    lines = [] if kept is None else read_lines(kept, _read_line, "text", "delete it")
    done = {tuple(line["prompt"]): line["new"] for line in lines if line["most"] == judged.new}
    if kept is not None:
        drop_unfinished(kept)
    texts: list[Written] = []
    for sample in samples:
        prompt = sample.tokens[: sample.question or min(judged.prompt, len(sample.tokens) // 2)]
        new = done.get(tuple(prompt))
        if new is None and len(prompt) >= 2:
            try:
                new = engine.generate(prompt, judged.new).token_ids
            except PromptError:  # it fills the context
                continue
            if kept is not None:
                with writing("held-out texts to", kept, "make room and start the same command again"):
                    append_lines(kept, {"prompt": prompt, "most": judged.new, "new": new})
        if new:
            texts.append(Written([*prompt, *new], len(prompt)))
    return texts


def _read_line(number: int, text: bytes) -> dict[str, Any]:
    line: dict[str, Any] = read_json(dict[str, int | list[int]], text)
    if not isinstance(line.get("prompt"), list) or not isinstance(line.get("new"), list) or "most" not in line:
        raise ValueError("it has no prompt, most and new")
    return line


def standard_error(tokens: Sequence[float], steps: Sequence[float]) -> float:
    """The standard error of tokens per step, a ratio of sums over texts; 0 for a single text.

    Args:
        tokens: new tokens of each text.
        steps: steps of each text.
    """
    count, mean = len(tokens), sum(tokens) / max(sum(steps), 1)
    if count < 2:
        return 0.0
    squares = sum((own - mean * made) ** 2 for own, made in zip(tokens, steps, strict=True))
    return math.sqrt(count / (count - 1) * squares) / sum(steps)
