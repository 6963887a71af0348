"""Training texts: ShareGPT conversations, plain text, or the standard library.

A sample has tokens and a mask of the *trained* tokens: an assistant's answers with the tokens that end them, see
:mod:`training.spans`; in plain text all except special tokens. Skipped records are reported with their place and
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from drafters.rest.stdlib_corpus import STDLIB, read_files
from specdec.engine.conversations import is_text, turns_of, writes_chats
from specdec.errors import ConfigError, shown
from specdec.settings.files import parse_json
from specdec.settings.formats import LINES, read_content
from specdec.settings.validation import check_fields
from training.skips import Skipping, Skips
from training.spans import Message, answer_spans, chat_spans, plain, trained_tokens, vicuna_writer
from training.split import Sample, is_drawn, prompt_of, split

__all__ = ["Sample", "Skips", "TextConfig", "load_samples", "read_samples"]

_SPEAKERS = ("user", "assistant", "system", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """How texts become samples.

    Attributes:
        length: tokens of a training window; longer samples are cut into windows.
        template: ``tokenizer`` for its chat template; ``vicuna`` for version 1.1; ``plain`` for turns without
            separators, for texts that a model continued; ``auto`` for the chat template if there is one, else
            ``vicuna``.
        skip: how many records of a file can be skipped: a ``few``, three or one in a hundred, or ``any`` number.
        held_out_one_in: one in so many prompts is kept for evaluation with all its samples, by a hash, without
            ``eval_data``; see :mod:`training.split`.
    """

    length: Annotated[int, Ge(8), Le(1 << 20), "an integer from 8 to 1048576"] = 512
    template: Literal["auto", "tokenizer", "vicuna", "plain"] = "auto"
    skip: Skipping = "few"
    held_out_one_in: Annotated[int, Ge(2), "an integer >= 2"] = 50

    def __post_init__(self) -> None:
        check_fields(self, "text.")


def read_samples(sources: Sequence[str], tokenizer: Any, config: TextConfig, skips: Skips) -> Iterator[Sample]:
    """Yield the samples of all sources: ``stdlib``, or files in the formats of :mod:`specdec.settings.formats`.

    Raises:
        ConfigError: a file has neither conversations nor text, or more unusable records than ``config.skip`` allows; or
            the tokenizer gives no offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} gives no character offsets, by which the loss mask is found; "
            "use a fast tokenizer (one with a tokenizer.json)"
        )
    for source in sources:
        if source == STDLIB:
            for held_out in (False, True):
                for name, text in read_files(held_out=held_out):
                    yield _plain(text, tokenizer, held_out, prompt_of(f"{STDLIB}/{name}"))
            continue
        content = read_content(Path(source), strict=False)
        if isinstance(content, str):
            prompt = prompt_of(content)
            yield _plain(content, tokenizer, is_drawn(prompt, config.held_out_one_in), prompt)
            continue
        for record in skips.values(Path(source), content, config.skip, _REMEDY):
            turns = _turns(record, skips)
            if turns is None:
                continue
            sample = _conversation(turns, tokenizer, config, skips, _file_of(record, config))
            if sample is not None:
                yield sample


_FORM = '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}, as ShareGPT has it'
_REMEDY = f"set text.skip=any to go on without them; a conversation is {_FORM}"


def load_samples(
    data: Sequence[str],
    eval_data: Sequence[str],
    config: TextConfig,
    tokenizer: Any,
    say: Callable[[str], object] = print,
    *,
    vocab_size: int | None = None,
) -> tuple[list[Sample], list[Sample]]:
    """Samples for training and for evaluation; ``say`` reports what was left out.

    Args:
        data, eval_data: sources as for ``read_samples``; an empty ``eval_data`` holds out a share of ``data``.
        config: how texts become samples.
        tokenizer: the target's tokenizer.
        say: receives one line at a time.
        vocab_size: the target's vocabulary size, if known.

    Raises:
        ConfigError: the data has nothing usable, or tokens outside the target's vocabulary.
    """
    skips = Skips()
    samples = list(read_samples(data, tokenizer, config, skips))
    held = list(read_samples(eval_data, tokenizer, config, skips))
    for line in skips.lines():
        say(line)
    why = f"{'; '.join(skips.lines()) or 'the files are empty'}; a conversation is {_FORM}"
    if eval_data and not held:
        raise ConfigError(f"{', '.join(eval_data)}: not one usable conversation to evaluate with; {why}")
    top = max((max(s.tokens) for s in (*samples, *held) if s.tokens), default=0)
    if vocab_size is not None and top >= vocab_size:
        raise ConfigError(
            f"the tokenizer gives token {top}, and the model knows [0, {vocab_size}): it is another model's tokenizer; "
            "put the model's own beside its weights"
        )
    learnt, held = split(samples, held, say)
    if not learnt:
        raise ConfigError(f"{', '.join(data)}: not one usable conversation; {why}")
    return learnt, held


def _turns(record: Any, skips: Skips) -> list[Message] | None:
    """A ShareGPT record's messages, alternating, the last one an answer; None where it has nothing to train on."""
    turns = turns_of(record)
    if turns is None:
        skips.skip("no list of conversations, or of messages")
        return None
    raw = record.get("conversations", record.get("messages"))
    beside = record.get("system")  # a field, as some write it
    if turns and turns[0][0] != "system" and beside and str(beside).strip():
        turns, raw = [("system", beside), *turns], [{}, *raw]
    messages: list[Message] = []
    for (role, text), turn in zip(turns, raw, strict=True):
        if role not in _SPEAKERS:
            skips.skip(f"unknown speaker {shown(role)}")
            return None
        calls = _calls(role, turn)
        if isinstance(text, list) and text:
            skips.mended["cut at a turn with parts that are no text"] += 1
            break
        if not calls and not (isinstance(text, str) and text.strip()):
            # What follows an empty turn answers something that is missing.
            empty = text in (None, []) or isinstance(text, str)
            skips.mended[f"cut at {'an empty turn' if empty else 'a turn that is no text'}"] += 1
            break
        if text is not None and not is_text(text):
            skips.mended["cut at a turn with half of a surrogate pair, which is no text"] += 1
            break
        if role == "system" and messages:
            skips.mended["cut at a system turn that is not the first"] += 1
            break
        before = messages[-1]["role"] if messages else None
        if role == "assistant" and before in (None, "system"):
            skips.mended["opening turn of the assistant dropped"] += 1
        elif role == before and role != "tool" and not calls and "tool_calls" not in messages[-1]:
            skips.mended["two turns of one speaker joined"] += 1
            messages[-1]["content"] += "\n\n" + text
        else:
            messages.append({"role": role, "content": text or "", **calls})
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        skips.skip("no answer of an assistant")
        return None
    return messages


def _calls(role: str, turn: Mapping[str, Any]) -> dict[str, Any]:
    """The tool calls of an assistant's message, as OpenAI has them; templates take their arguments as an object."""
    calls = turn.get("tool_calls")
    if role != "assistant" or not isinstance(calls, list) or not calls:
        return {}
    return {"tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    with suppress(ValueError):
        return {**call, "function": {**function, "arguments": parse_json(function["arguments"])}}
    return call


def _conversation(
    messages: list[Message], tokenizer: Any, config: TextConfig, skips: Skips, file: str | None = None
) -> Sample | None:
    """A sample of messages: write them as one text, find the answers, and tokenize it once.

    ``file`` is the file whose text the turns are a piece of, if there is one; all its pieces have one prompt.
    """
    own = config.template == "tokenizer" or (config.template == "auto" and writes_chats(tokenizer))
    ends = {*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())}
    try:
        if own:
            text, spans = chat_spans(messages, tokenizer, ends)
        else:
            if config.template != "plain" and any(message["role"] == "tool" for message in messages):
                raise ValueError("Vicuna's format has no place for a tool's turn")
            write = plain if config.template == "plain" else vicuna_writer(tokenizer.eos_token or "")
            text, spans = answer_spans(messages, write, ends)
    except ValueError as error:
        skips.skip(str(error))
        return None
    # As in decoding: a template writes the begin token itself; for plain text the tokenizer adds it.
    encoded = tokenizer(text, add_special_tokens=not own, return_offsets_mapping=True, verbose=False)
    trained = trained_tokens(encoded["offset_mapping"], spans)
    prompt = prompt_of(*_asked(messages)) if file is None else prompt_of(file)
    question = trained.index(True) if True in trained else len(trained)
    return Sample(list(encoded["input_ids"]), trained, is_drawn(prompt, config.held_out_one_in), prompt, question)


def _file_of(record: Any, config: TextConfig) -> str | None:
    """The file that a record is a piece of, as ``distill-data`` names it in answers to plain text."""
    source = record.get("source")
    if config.template != "plain" or not isinstance(source, str):
        return None
    return source if Path(source).suffix.lower() not in ("", ".json", *LINES) else None


def _asked(messages: list[Message]) -> tuple[str, str]:
    """The system's turn and the user's first."""
    first = {message["role"]: message["content"] for message in reversed(messages)}
    return first.get("system", ""), first.get("user", "")


def _plain(text: str, tokenizer: Any, held_out: bool, prompt: str) -> Sample:
    tokens = list(tokenizer(text, verbose=False)["input_ids"])
    special = set(tokenizer.all_special_ids)
    return Sample(tokens, [token not in special for token in tokens], held_out, prompt)
