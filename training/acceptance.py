"""Acceptance on held-out text without decoding, measured in one forward for each text.

If the target itself wrote a text greedily, the tokens that a chain drafter gets accepted there *are* the text. So
features are those of drafting, and steps can be counted from two facts about each position: whether the guess is the
text's next token, and whether the drafter is sure enough to go on. The count equals the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.engine.engine import Engine
from specdec.settings.validation import AtLeast1, check_fields
from training.data import Sample

__all__ = ["EvalConfig", "Tally", "Written", "continued_texts"]

_DEEPEST = 6  # CTAR(1) .. CTAR(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation: the target continues ``prompts`` texts of up to ``prompt`` tokens by up to ``new``."""

    prompts: AtLeast1 = 24
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


def continued_texts(engine: Engine, samples: Sequence[Sample], judged: EvalConfig) -> list[Written]:
    """Let the target continue ``judged.prompts`` of the samples, evenly spread, greedily.

    A conversation is cut before its first answer, if that begins within ``prompt`` tokens; plain text is cut after
    ``prompt`` tokens, or in its middle if it is short.
    """
    texts: list[Written] = []
    for sample in samples[:: max(1, len(samples) // max(judged.prompts, 1))][: judged.prompts]:
        first = sample.trained.index(True) if True in sample.trained else 0
        cut = first if 4 <= first <= judged.prompt else min(judged.prompt, len(sample.tokens) // 2)
        if cut >= 2:
            written = engine.generate(sample.tokens[:cut], judged.new).token_ids
            texts.append(Written([*sample.tokens[:cut], *written], cut))
    return texts
