"""Self-distillation data: a ShareGPT file of prompts of any kind, answered by the target itself.

Drafters learn best from their target's own texts (Cai et al. 2024, section 2.2.3). Many prompts are answered at once.
An answer depends on its prompt, its index and the options, not on the answers beside it. Each is written to disk when
it ends, so a killed run continues where it was.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafters.rest.stdlib_corpus import STDLIB, read_files
from specdec.engine.conversations import MARK, is_text, turns_of, writes_chats
from specdec.engine.engine import Engine
from specdec.engine.prompt import token_ids
from specdec.engine.questions import Question, build_prompt, form_of, read_questions
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.text_stream import as_content, stop_strings
from specdec.errors import ConfigError, PromptError
from specdec.results import Generation
from specdec.settings.files import write_text
from specdec.settings.formats import LINES, Record, read_content
from specdec.settings.sampling_params import SamplingParams
from specdec.settings.unfinished import unfinished
from training.skips import Skipping, Skips

__all__ = ["SELF", "Distilled", "distill", "own_prompts", "prompts_of", "talk"]

TURNS = ("first", "all")
SELF = "self"
"""The source for which the target writes the questions itself, if its chat template lets a user begin (Xu et al. 2024,
"Magpie", arXiv 2406.08464). They resemble the ones that it was trained to answer, and need no data set."""

_QUESTION = 100  # most tokens of a question that the target writes


@dataclass(frozen=True, slots=True)
class Distilled:
    """A run's result: the number of ``records``, ``new_tokens`` of this run, and reasons for what was left out."""

    records: int
    new_tokens: int
    skipped: Counter[str]


def prompts_of(
    sources: Sequence[str],
    tokenizer: Any,
    *,
    turns: str = "first",
    prompt_tokens: int = 128,
    skips: Skips | None = None,
    skipping: Skipping = "few",
) -> list[Question]:
    """The prompts of all sources, numbered from 0.

    A source is ``stdlib`` (the training side of Python's own sources), a ShareGPT file (its human turns), a question
    file (JSON with turns, prompt or question), or text, which is cut into prompts of ``prompt_tokens`` tokens; see
    :mod:`specdec.settings.formats`. ``skips`` counts the conversations without a question, and ``skipping`` limits
    their number for each file.

    Raises:
        ConfigError: a source cannot be read, there is no prompt, or texts are mixed with conversations.
    """
    if turns not in TURNS:
        raise ConfigError(f"turns is {turns!r}; it must be one of {', '.join(TURNS)}")
    conversations: list[tuple[str, tuple[str, ...], str | None]] = []
    for source in sources:
        if source == STDLIB:
            for name, text in read_files(held_out=False):
                conversations += [
                    (f"stdlib/{name}", (part,), "plain") for part in _pieces(text, tokenizer, prompt_tokens)
                ]
            continue
        path, content = Path(source), read_content(Path(source))
        if isinstance(content, str):
            conversations += [(path.name, (part,), "plain") for part in _pieces(content, tokenizer, prompt_tokens)]
        else:
            for asked, form in _asked(path, content, Skips() if skips is None else skips, skipping):
                conversations.append((path.name, asked[:1] if turns == "first" else asked, form))
    if not conversations:
        raise ConfigError(f"{', '.join(sources) or 'no source'}: not one prompt; give conversations, questions or text")
    if len({form == "plain" for _, _, form in conversations}) > 1:
        raise ConfigError(
            f"{', '.join(sources)} mix texts to be continued with questions to be answered, which training would have "
            "to tell apart; distill them into two files"
        )
    return [
        Question(id=n, category=name, turns=said, format=form) for n, (name, said, form) in enumerate(conversations)
    ]


def own_prompts(count: int) -> list[Question]:
    """Prompts whose only turn the target writes itself."""
    return [Question(id=number, category=SELF, turns=()) for number in range(count)]


Talk = Generator[Request, Generation, dict[str, Any]]
"""Yields requests one after another, receives each generation, and returns a line for the unfinished file."""


def distill(
    engine: Engine,
    prompts: Sequence[Question],
    out: Path,
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    form: str = "auto",
    batch: int = 8,
    run: Mapping[str, Any],
) -> Distilled:
    """Answer the prompts; when all are answered, write the file ``out`` in the prompts' order.

    Until then, answers are lines of ``out`` + ``.partial`` in the order of their ends; the same call continues from it.

    Args:
        sampling: the noise of a draw depends on the seed plus the prompt's index; ``auto`` acceptance becomes
            ``match``, so that answers are the same under every drafter.
        stop: strings that end an answer; the answer is cut before them.
        stop_token_ids: tokens that end an answer, in addition to the target's end tokens.
        form: how turns become a prompt, see :func:`specdec.engine.questions.build_prompt`.
        batch: number of prompts answered at once; it changes the speed, and answers only where
            :mod:`specdec.engine.scheduler` says that rounding depends on the batch.
        run: JSON values that identify this run; an unfinished file of another run is refused.

    Raises:
        ConfigError: ``out`` exists, or is unfinished with other options.
        CheckpointError: the disk cannot be written to.
        SpecdecError: an answer fails, except for a prompt that is too long, which is left out.
    """
    if sampling.acceptance == "auto":
        sampling = replace(sampling, acceptance="match")
    stops = {"stop": stop_strings(stop), "stop_token_ids": list(stop_token_ids)}
    header = {**run, "new": max_new_tokens, "form": form, **asdict(sampling)}
    header |= {name: values for name, values in stops.items() if values}
    tokens = 0
    with unfinished(out, header, [prompt.turns for prompt in prompts], _check_line) as answers:
        talks = _Talks(
            (number, talk(engine, prompts[number], form, max_new_tokens, sampling.seed + number, sampling, stops))
            for number in answers.left
        )
        bar = tqdm(initial=len(answers.done), total=len(prompts), unit="prompt", mininterval=1.0, desc=out.name)
        with bar, engine.target.active():
            for event in chain.from_iterable(Scheduler(engine, talks, batch=batch).run()):
                if not event.last:
                    continue
                generation = event.generation()
                if generation.error is not None and not isinstance(generation.error, PromptError):
                    raise generation.error
                tokens += len(generation.token_ids)
                for number, line in talks.answered(event.index, generation):
                    answers.add(number, line)
                    bar.update()
                bar.set_postfix(tokens=tokens, refresh=False)
        made = [answers.done[number] for number in range(len(prompts))]
        records = [json.dumps(line["record"]) for line in made if line["record"] is not None]
        write_text(
            out,
            "\n".join(records) + "\n" if out.suffix.lower() in LINES else "[\n" + ",\n".join(records) + "\n]\n",
        )
    return Distilled(len(records), tokens, Counter(line["skipped"] for line in made if line["record"] is None))


class _Talks:
    """The requests of numbered talks, in the scheduler's order.

    Talks that have begun come first. Once all have begun, there is no request until an answer arrives.
    """

    def __init__(self, talks: Iterable[tuple[int, Talk]]) -> None:
        self._new = iter(talks)
        self._ready = deque[tuple[int, Talk, Request]]()
        self._asked: list[tuple[int, Talk]] = []  # by index of the request

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if not self._ready:
            number, new = next(self._new)
            self._ready.append((number, new, next(new)))
        number, begun, request = self._ready.popleft()
        self._asked.append((number, begun))
        return request

    def answered(self, place: int, generation: Generation) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and line of the talk, if this answer ends it."""
        number, begun = self._asked[place]
        try:
            self._ready.append((number, begun, begun.send(generation)))
        except StopIteration as end:
            yield number, end.value


def talk(
    engine: Engine,
    prompt: Question,
    form: str,
    max_new_tokens: int,
    seed: int,
    sampling: SamplingParams,
    stops: Mapping[str, Any],
) -> Talk:
    """A prompt's turns; each later turn follows the target's own answers."""
    turns: list[dict[str, str]] = []
    answers: list[str] = []
    reason = ""
    if prompt.category == SELF:
        own = yield Request(_users_place(engine.tokenizer), _QUESTION, SamplingParams(temperature=1.0, seed=seed))
        if own.finish_reason != "eos" or len(own.text.split()) < 2:
            return {"record": None, "skipped": "a question that does not end, or is none"}
        prompt = replace(prompt, turns=(own.text.strip(),))
    sampling = replace(sampling, seed=seed)
    for said in prompt.turns:
        request = Request(build_prompt(prompt, answers, form, engine.tokenizer), max_new_tokens, sampling, **stops)
        generation = yield request
        if isinstance(generation.error, PromptError):
            reason = "prompt longer than the context"
            break
        if not generation.text.strip():
            reason = "empty answer"
            break
        answer = _answer(generation, form_of(prompt, form, engine.tokenizer), engine.tokenizer)
        answers.append(answer)
        turns += [{"from": "human", "value": said}, {"from": "gpt", "value": answer}]
        if generation.finish_reason not in ("eos", "stop"):
            break  # the answer was cut off, so nothing should follow
    if not turns:
        return {"record": None, "skipped": reason}
    return {"record": {"id": str(prompt.id), "source": prompt.category, "conversations": turns}}


def _answer(generation: Generation, form: str, tokenizer: Any) -> str:
    """The answer as a record's text; where a turn is written as text, the space before it is included."""
    if form == "plain":
        return generation.text
    return (
        generation.text.removeprefix(" ")
        if form == "vicuna"
        else as_content(generation.text, tokenizer, generation.token_ids)
    )


def _users_place(tokenizer: Any) -> list[int]:
    """The tokens that the chat template writes before a user's first words.

    Raises:
        ConfigError: the tokenizer has no chat template that writes a user's words unchanged.
    """
    needs = ConfigError(f"the source {SELF!r} needs a chat template; give a chat model, or prompts of your own")
    if not writes_chats(tokenizer):
        raise needs
    if not getattr(tokenizer, "chat_template", None):  # such a tokenizer writes tokens; its text is for display only
        talks = [token_ids([{"role": "user", "content": content}], tokenizer) for content in (MARK, "a")]
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*talks, strict=False))]
    messages = [{"role": "user", "content": MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, mark, _ = text.partition(MARK)
    if not mark:
        raise needs
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])


def _check_line(line: Mapping[str, Any]) -> None:
    record = line.get("record")
    if not (turns_of(record) if record is not None else isinstance(line.get("skipped"), str)):
        raise ValueError("it holds neither a conversation nor why there is none")


def _pieces(text: str, tokenizer: Any, size: int) -> Iterator[str]:
    """Pieces of the text of ``size`` tokens, each from a line's start; a short last piece is left out."""
    lines, ends = text.splitlines(keepends=True), list[int]()
    for ids in tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"] if lines else ():
        ends.append((ends[-1] if ends else 0) + len(ids))
    first, before = 0, 0
    for number, end in enumerate(ends, 1):
        if end - before >= size:
            piece = "".join(lines[first:number])
            if piece.strip():
                yield piece
            first, before = number, end


def _asked(
    path: Path, records: Sequence[Record], skips: Skips, skipping: Skipping
) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """The human turns of a ShareGPT file, or a question file's questions with the form that each asks for."""
    if all(turns_of(record.value) is None for record in records):
        for question in read_questions(path):
            yield question.turns, question.format
        return
    for value in skips.values(path, records, skipping, "go on without them by --skip any"):
        turns = turns_of(value)
        said = tuple(text for role, text in turns or () if role == "user")
        if turns is None:
            skips.skip("no list of conversations, or of messages")
        elif not said:
            skips.skip("no turn of a user")
        elif not all(is_text(part) and part.strip() for part in said):
            skips.skip("a user's turn that is empty, or no text")
        else:
            yield said, None
