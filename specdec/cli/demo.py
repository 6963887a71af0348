"""The demo: a conversation that several drafters go through together, which ends in a table of what each brought.

Each drafter decodes its own answer, a step at a time, and the one whose clock stands lowest goes next: so they are seen
at their true speeds against each other, though in fact one works at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from specdec.engine.engine import Engine
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.prompt import Prompt, is_chat
from specdec.engine.questions import Question, find_questions, read_questions
from specdec.engine.sequence import SequenceState
from specdec.engine.text_stream import as_content
from specdec.errors import CheckpointError
from specdec.models.catalog import named_models
from specdec.results import Chunk, Generation
from specdec.settings.sampling_params import SamplingParams

__all__ = ["Race", "Result", "model_at_hand", "question_for"]


def model_at_hand() -> tuple[str, str | None]:
    """The model that the demo talks with, and why it is not the one that was meant."""
    try:
        named_models()["smollm2"].found()
    except CheckpointError as error:
        return "tiny", str(error)
    return "smollm2", None


def question_for(model: str) -> Question:
    """The default prompts; the embedded model knows only Python code and continues some."""
    file, number = ("tiny", 15) if model == "tiny" else ("six_kinds", 1)
    return next(question for question in read_questions(find_questions(file)) if question.id == number)


@dataclass(slots=True)
class Result:
    """One drafter's answers."""

    drafter: str
    generations: list[Generation] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(one.stats.new_tokens for one in self.generations)

    @property
    def steps(self) -> int:
        return sum(one.stats.steps for one in self.generations)

    @property
    def tokens_per_second(self) -> float:
        """The prefill not counted."""
        return self.tokens / max(sum(one.stats.seconds.decode for one in self.generations), 1e-9)

    def first_difference(self, other: Result) -> int | None:
        """Number of the first token in which the texts differ, from 1; None if they are identical."""
        mine, theirs = ([token for one in r.generations for token in one.token_ids] for r in (self, other))
        pairs = enumerate(zip_longest(mine, theirs), 1)
        return next((place for place, (own, their) in pairs if own != their), None)


class Race:
    """Drafters on one target; plain decoding goes first and is the reference.

    Raises:
        ConfigError: an unknown drafter.
    """

    def __init__(
        self, engine: Engine, drafters: Iterable[str], *, max_new_tokens: int, sampling: SamplingParams
    ) -> None:
        names = dict.fromkeys(["none", *drafters])
        self.engines = {name: engine.with_drafter(name) for name in names}
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.results = {name: Result(name) for name in names}
        self._kept = {name: PrefixCache() for name in names}
        self._under_way: dict[str, SequenceState] = {}

    def warm_up(self) -> None:
        """A few uncounted tokens of each, so that none pays for what all need."""
        for engine in self.engines.values():
            engine.generate([0, 0, 0], 8)

    def turn(self, prompt: Prompt, on_chunk: Callable[[str, Chunk], None] = lambda name, chunk: None) -> str:
        """All decode an answer, and every step is handed on with its drafter's name; returns plain decoding's."""
        self._under_way = {
            name: engine.start(prompt, self.max_new_tokens, self.sampling, prefix_cache=self._kept[name], stream=True)
            for name, engine in self.engines.items()
        }
        streams = {name: decoding.chunks() for name, decoding in self._under_way.items()}
        while streams:
            name = min(streams, key=lambda one: self._under_way[one].stats.seconds.decode)
            chunk = next(streams[name], None)
            if chunk is None:
                del streams[name]
            else:
                on_chunk(name, chunk)
        for name, decoding in self._under_way.items():
            self.results[name].generations.append(decoding.result())
        plain = self.results["none"].generations[-1]
        tokenizer = self.engines["none"].tokenizer
        return as_content(plain.text, tokenizer, plain.token_ids) if is_chat(prompt) else plain.text

    def speed(self, name: str) -> float:
        """Tokens per second of an answer under way."""
        return self._under_way[name].stats.tokens_per_second
