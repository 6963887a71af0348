"""Samples, and their split into those that are trained and those that are held out: no prompt is on both sides.

The target itself answers the prompts that are held out, so another answer to them must not be trained either.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.errors import ConfigError

__all__ = ["Sample", "digest_of_samples", "is_drawn", "prompt_of", "prompts_in", "split"]

_LEAST = 2  # prompts to hold out


@dataclass(frozen=True, slots=True)
class Sample:
    """A text's n token ids, and for each whether it is trained.

    Attributes:
        held_out: whether the draw by the prompt's hash keeps it for evaluation; :func:`split` decides.
        prompt: hash of the prompt, see ``prompt_of``; for plain text, of its file.
        question: tokens before a conversation's first answer; 0 for plain text, which has no question.
    """

    tokens: list[int]
    trained: list[bool]
    held_out: bool
    prompt: str = ""
    question: int = 0


def prompt_of(*parts: str) -> str:
    """A hash of the parts of a prompt; case, width and spaces do not count."""
    normal = (" ".join(unicodedata.normalize("NFKC", part).casefold().split()) for part in parts)
    return hashlib.sha256("\0".join(normal).encode("utf-8", "surrogatepass")).hexdigest()


def is_drawn(prompt: str, one_in: int) -> bool:
    """Whether the draw holds a prompt out, one in so many."""
    return int(prompt[:8], 16) % one_in == 0


def prompts_in(samples: Sequence[Sample]) -> list[Sample]:
    """The first sample of each prompt, in their order."""
    return [*{sample.prompt or id(sample): sample for sample in reversed(samples)}.values()][::-1]


def digest_of_samples(samples: Sequence[Sample]) -> str:
    """A hash of the samples' tokens, in any order."""
    texts = sorted(repr((sample.tokens, sample.question)) for sample in samples)
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def split(
    data: Sequence[Sample], judged: Sequence[Sample], say: Callable[[str], object]
) -> tuple[list[Sample], list[Sample]]:
    """The samples to train, and those to judge by.

    Args:
        data: samples of the training data.
        judged: samples of the data for evaluation; where there are some, nothing of ``data`` is held out.
        say: receives lines about what is left out.

    Raises:
        ConfigError: all prompts of ``data`` are in ``judged``.
    """
    if judged:
        held = {sample.prompt for sample in judged}
        learnt = [sample for sample in data if sample.prompt not in held]
        if data and not learnt:
            raise ConfigError("all prompts of data are in eval_data as well; give others to train, or no eval_data")
        if len(learnt) < len(data):
            say(f"{len(data) - len(learnt)} samples are not trained, as eval_data has their prompts")
        return learnt, [*judged]
    held = _held(data)
    if data and not held:
        say("nothing is held out, as all samples have one prompt, so best/ is the last step's; eval_data judges it")
    return [s for s in data if s.prompt not in held], [s for s in data if s.prompt in held]


def _held(data: Sequence[Sample]) -> set[str]:
    """The prompts to hold out: those drawn and, where they are fewer than two, the lowest hashes.

    A prompt of more than half of the samples is not held out, and one prompt always stays.
    """
    counts = Counter(sample.prompt for sample in data)
    drawn = {sample.prompt for sample in data if sample.held_out}
    held, left = set[str](), len(data)
    for prompt in sorted(counts, key=lambda prompt: (prompt not in drawn, prompt)):
        wanted = prompt in drawn or len(held) < _LEAST
        if wanted and 2 * counts[prompt] <= len(data) and counts[prompt] < left:
            held.add(prompt)
            left -= counts[prompt]
    return held
