"""Answers to ``/v1/chat/completions``: messages, with tool calls that are read from the text."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.serve.answers import Answer, Json, Speaker
from specdec.serve.call_styles import Style
from specdec.serve.calls import CallReader, Delta, MessageReader
from specdec.serve.choices import Choice, Piece
from specdec.serve.fields import ChatRequest
from specdec.serve.marks import hidden_tokens
from specdec.serve.plan import Plan
from specdec.serve.thinking import THINK_MARKS

__all__ = ["ChatAnswer"]


class ChatAnswer(Answer):
    """The answer to a chat, for arguments of :class:`specdec.serve.answers.Answer`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, plan: Plan, speaker: Speaker) -> None:
        assert isinstance(plan.fields, ChatRequest)
        tools = () if plan.fields.tool_choice == "none" else plan.fields.tools or ()
        style = speaker.style or Style()
        marked = bool(style.marks and tools) and plan.forced is None
        marks = (*(style.marks + style.others if marked else ()), *(THINK_MARKS if plan.thinking else ()))
        super().__init__(plan, speaker, hidden_tokens(speaker.tokenizer, marks) if marks else None)
        types = {tool.function.name: tool.function.parameters or {} for tool in tools}
        streams = bool(plan.fields.stream)
        self._readers = [
            MessageReader(plan.thinking, CallReader(plan.forced, marked, style, types, streams=streams))
            for _ in self.choices
        ]

    def opening(self) -> list[Json]:
        first = {"role": "assistant", "content": ""}
        ended = [one for one in self.choices if one.finish_reason is not None]
        return [
            *(self._chunk([_piece(choice, first)]) for choice in self.choices),
            *(self._chunk([_piece(choice, {}, choice.finish_reason)]) for choice in ended),
        ]

    def whole(self) -> Json:
        told = self._plan.fields.prompt_logprobs is not None
        more = {"prompt_logprobs": self._prompt_logprobs(self.choices[0])} if told else {}
        return {**super().whole(), **more}

    def _pieces(self, choice: Choice, piece: Piece) -> list[Json]:
        logprobs = None if self._plan.logprobs is None else self._names.chat(piece.logprobs)
        always = logprobs is not None or piece.traced
        deltas = self._readers[choice.index].read(piece.text, piece.last) or ([{"content": ""}] if always else [])
        found = [_piece(choice, delta) for delta in deltas]
        if found and logprobs is not None:
            found[0]["logprobs"] = logprobs
        if piece.last:
            found.append(_piece(choice, {}, self._reason(choice)))
        return found

    def _choice(self, choice: Choice) -> Json:
        logprobs = None if self._plan.logprobs is None else self._names.chat(choice.logprobs)
        message = _message(self._readers[choice.index].read(choice.text, True))
        reason = self._reason(choice)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _reasoning_tokens(self) -> int:
        if self._plan.thinking is None:
            return 0
        close = self._tokenizer.get_added_vocab().get(THINK_MARKS[1])
        return sum(choice.tokens.index(close) + 1 for choice in self.choices if close in choice.tokens)

    def _reason(self, choice: Choice) -> str | None:
        calls = self._readers[choice.index].called
        ends = calls and choice.finish_reason == "stop" and not self._plan.forced
        return "tool_calls" if ends else choice.finish_reason


def _piece(choice: Choice, delta: Delta, reason: str | None = None) -> Json:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _message(deltas: Sequence[Delta]) -> Json:
    """The whole message that a stream's pieces add up to."""
    said = [delta["content"] for delta in deltas if "content" in delta]
    thought = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    calls: list[Json] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            calls.append({name: value for name, value in call.items() if name != "index"})
    message: Json = {"role": "assistant", "content": "".join(said) if said or not calls else None}
    if thought:
        message["reasoning_content"] = "".join(thought)
    return {**message, "tool_calls": calls} if calls else message
