"""Self-distillation data: prompts of any kind, answered by the target itself, as a ShareGPT file.

Drafters learn best from what their target writes (Cai et al. 2024, section 2.2.3). Every answer is a function of its
prompt, its number and the options, and is on disk when the next one begins, so a killed run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafters.stdlib_corpus import STDLIB, read_files
from specdec.bench.questions import Question, build_prompt, read_questions
from specdec.conversations import is_text, read_records, turns_of
from specdec.engine import Engine
from specdec.errors import CheckpointError, ConfigError, PromptError
from specdec.files import read_text, resume, write_text
from specdec.sampling import SamplingParams
from specdec.text import stop_strings

__all__ = ["SELF", "Distilled", "distill", "own_prompts", "prompts_of"]

TURNS = ("first", "all")
SELF = "self"
"""The source whose questions the target writes itself, where its chat template lets a user begin (Xu et al. 2024,
"Magpie", arXiv 2406.08464): they are of the kind that it was trained to answer, and no data set is needed."""

_QUESTION = 100  # tokens, at most, of a question that the target writes
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Distilled:
    """What a run made: ``records`` in the file, ``new_tokens`` of this run's answers, and what was left out and why."""

    records: int
    new_tokens: int
    skipped: Counter[str]


def prompts_of(
    sources: Sequence[str], tokenizer: Any, *, turns: str = "first", prompt_tokens: int = 128
) -> list[Question]:
    """The prompts of all sources, numbered from 0.

    A source is ``stdlib`` (the training side of Python's own sources), a ShareGPT file (its human turns), a question
    file (``.jsonl`` with turns, prompt or question), or text, of which every ``prompt_tokens`` tokens are a prompt.

    Raises:
        ConfigError: a source that cannot be read, no prompt at all, or texts mixed with conversations.
    """
    if turns not in TURNS:
        raise ConfigError(f"turns is {turns!r}; it must be one of {', '.join(TURNS)}")
    found: list[tuple[str, tuple[str, ...], str | None]] = []
    for source in sources:
        if source == STDLIB:
            for name, text in read_files(held_out=False):
                found += [(f"stdlib/{name}", (part,), "plain") for part in _pieces(text, tokenizer, prompt_tokens)]
        elif Path(source).suffix in (".json", ".jsonl"):
            for asked, form in _conversations(Path(source)):
                found.append((Path(source).name, asked[:1] if turns == "first" else asked, form))
        else:
            text = read_text(Path(source), "the data file", "give UTF-8 text or JSON")
            found += [(Path(source).name, (part,), "plain") for part in _pieces(text, tokenizer, prompt_tokens)]
    if not found:
        raise ConfigError(f"{', '.join(sources) or 'no source'}: not one prompt; give conversations, questions or text")
    if len({form == "plain" for _, _, form in found}) > 1:
        raise ConfigError(
            f"{', '.join(sources)} mix texts to be continued with questions to be answered, which training would have "
            "to tell apart; distill them into two files"
        )
    return [Question(id=n, category=name, turns=said, format=form) for n, (name, said, form) in enumerate(found)]


def own_prompts(count: int) -> list[Question]:
    """Prompts whose only turn the target is to write itself."""
    return [Question(id=number, category=SELF, turns=()) for number in range(count)]


def distill(
    engine: Engine,
    prompts: Sequence[Question],
    out: Path,
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop: str | Sequence[str] = (),
    form: str = "auto",
    run: Mapping[str, Any],
) -> Distilled:
    """Answer the prompts in order, and put the file at ``out`` when all are answered.

    Until then they are lines of ``out`` + ``.partial``, from which the same call goes on.

    Args:
        sampling: a draw's noise is keyed by seed + number of the prompt; ``match`` stands in for ``auto``, so that the
            answers are the same under every drafter.
        stop: strings that end an answer; it is cut before them.
        form: how turns become a prompt, see :func:`specdec.bench.questions.build_prompt`.
        run: JSON values that say what this run is; the unfinished file of another is refused.

    Raises:
        ConfigError: ``out`` exists, or is half done with other options.
        CheckpointError: the disk refuses.
    """
    partial = out.with_name(out.name + ".partial")
    if out.exists():
        raise ConfigError(f"{str(out)!r} exists; delete it, or give another --out")
    asked = hashlib.sha256(json.dumps([prompt.turns for prompt in prompts]).encode()).hexdigest()[:16]
    if sampling.acceptance == "auto":
        sampling = replace(sampling, acceptance="match")
    stop = stop_strings(stop)
    header = {**run, "new": max_new_tokens, "form": form, **asdict(sampling), "prompts": len(prompts), "asked": asked}
    header |= {"stop": stop} if stop else {}
    tokens = 0
    try:
        done = resume(partial, header, _check_line)
        bar = tqdm(
            prompts[len(done) :], initial=len(done), total=len(prompts), unit="prompt", mininterval=1.0, desc=out.name
        )
        with partial.open("a", encoding="utf-8") as file:
            for number, prompt in enumerate(bar, len(done)):
                params = replace(sampling, seed=sampling.seed + number)
                line, spent = _answer(engine, prompt, form, max_new_tokens, params, stop)
                tokens += spent
                file.write(json.dumps(line) + "\n")
                file.flush()
                done.append(line)
                bar.set_postfix(tokens=tokens, refresh=False)
        records = [line["record"] for line in done if line["record"] is not None]
        _finish(partial, out, records)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {str(out)!r}: {error}; make room, and the same command goes on where it was"
        ) from error
    return Distilled(len(records), tokens, Counter(line["skipped"] for line in done if line["record"] is None))


def _answer(
    engine: Engine, prompt: Question, form: str, max_new_tokens: int, sampling: SamplingParams, stop: Sequence[str]
) -> tuple[dict[str, Any], int]:
    """A line of the unfinished file, and the tokens that it cost. A later turn follows the target's own answers."""
    tokens = 0
    if prompt.category == SELF:
        question, tokens = _own_question(engine, sampling.seed)
        if not question:
            return {"record": None, "skipped": "a question that does not end, or is none"}, tokens
        prompt = replace(prompt, turns=(question,))
    answers: list[str] = []
    turns: list[dict[str, str]] = []
    reason = ""
    for said in prompt.turns:
        try:
            asked = build_prompt(prompt, answers, form, engine.tokenizer)
            found = engine.generate(asked, max_new_tokens, sampling, stop=stop)
        except PromptError:
            reason = "prompt longer than the context"
            break
        tokens += len(found.token_ids)
        if not found.text.strip():
            reason = "empty answer"
            break
        answers.append(found.text)
        turns += [{"from": "human", "value": said}, {"from": "gpt", "value": found.text}]
        if found.finish_reason not in ("eos", "stop"):
            break  # cut off in mid-answer: nothing should follow
    if not turns:
        return {"record": None, "skipped": reason}, tokens
    return {"record": {"id": str(prompt.id), "source": prompt.category, "conversations": turns}}, tokens


def _own_question(engine: Engine, seed: int) -> tuple[str, int]:
    """A user's turn as the target samples it at temperature 1, and its tokens; no text where it does not end in time.

    Raises:
        ConfigError: the tokenizer has no chat template in which a user's words stand as they are.
    """
    template = getattr(engine.tokenizer, "chat_template", None)
    messages = [{"role": "user", "content": _MARK}]
    text = (
        engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if template else ""
    )
    before, found, _ = text.partition(_MARK)
    if not found:
        raise ConfigError(f"the source {SELF!r} needs a chat template; give a chat model, or prompts of your own")
    ids = engine.tokenizer(before, add_special_tokens=False)["input_ids"]
    made = engine.generate(list(ids), _QUESTION, SamplingParams(temperature=1.0, seed=seed))
    ended = made.finish_reason == "eos" and len(made.text.split()) > 1
    return made.text.strip() if ended else "", len(made.token_ids)


def _check_line(line: Mapping[str, Any]) -> None:
    """ValueError for a line of an unfinished file that is no answer of this command."""
    record = line.get("record")
    if not (turns_of(record) if record is not None else isinstance(line.get("skipped"), str)):
        raise ValueError("it holds neither a conversation nor why there is none")


def _finish(partial: Path, out: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """A JSON list, or lines for ``.jsonl``."""
    lines = [json.dumps(record) for record in records]
    write_text(out, "\n".join(lines) + "\n" if out.suffix == ".jsonl" else "[\n" + ",\n".join(lines) + "\n]\n")
    partial.unlink()


def _pieces(text: str, tokenizer: Any, size: int) -> Iterator[str]:
    """The text in pieces of ``size`` tokens, each begun at a line's start; a last short one is left out."""
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


def _conversations(path: Path) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """The human turns of a ShareGPT file, or a question file's questions and how they want to be asked."""
    records = [turns_of(record) for record in read_records(path)]
    if all(turns is None for turns in records):
        for question in read_questions(path):
            yield question.turns, question.format
    for turns in records:
        said = tuple(text for role, text in turns or () if role == "user")
        if said and all(is_text(part) and part.strip() for part in said):
            yield said, None
