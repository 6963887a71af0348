"""Token ids of a request's messages, texts or token lists."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, meta
from pydantic_core import from_json

from specdec.engine.conversations import writes_chats
from specdec.engine.engine import Engine
from specdec.engine.prediction import prediction_ids
from specdec.engine.prompt import token_ids
from specdec.errors import first_line, shown
from specdec.serve.errors import ApiError
from specdec.serve.fields import ChatRequest, Message, TokenizeRequest
from specdec.serve.parts import text_of
from specdec.serve.text_bounds import bytes_of_a_token, least_tokens
from specdec.serve.thinking import Thinking, thinking_of
from specdec.serve.tool_text import as_text

__all__ = ["Encoder"]

_log = logging.getLogger("specdec.serve")
_OWN = {
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}


class Encoder:
    """Makes prompts for an engine. One thread at a time may use it, as with tokenizers.

    Args:
        engine: the engine whose vocabulary bounds the prompts' tokens.
        tokenizer: a tokenizer that no other thread uses.
        context: most tokens of a prompt and its answer.
    """

    def __init__(self, engine: Engine, tokenizer: Any, context: int) -> None:
        self._engine, self._tokenizer, self.context = engine, tokenizer, context
        self._token_bytes = bytes_of_a_token(tokenizer)
        self.knows_tools = _names_tools(getattr(tokenizer, "chat_template", None))
        self._warned = False

    def prompt(self, prompt: str | Sequence[int], *, special: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that begin one; token ids are checked and returned.

        Raises:
            ApiError: the prompt exceeds the context.
            PromptError: the prompt is empty, or has tokens outside the vocabulary.
        """
        if isinstance(prompt, str):
            self._check_text(prompt, "prompt")
            if not special:
                return self._fitting(list(self._tokenizer(prompt, add_special_tokens=False)["input_ids"]), "prompt")
        return self._fitting(token_ids(prompt, self._tokenizer), "prompt")

    def prediction(self, text: str, room: int) -> list[int]:
        """Token ids of a prediction, a text that the answer is expected to resemble.

        Raises:
            ApiError: it is longer than ``room``, the tokens that the context leaves to the answer.
        """
        least, tokens = least_tokens(text, self._token_bytes), list[int]()
        if least <= room:
            tokens = prediction_ids(text, self._tokenizer, self._engine.target.vocab_size)
        if max(least, len(tokens)) > room:
            count = f"{len(tokens)}" if tokens else f"at least {least}"
            raise ApiError(
                f"prediction.content has {count} tokens, and the context leaves {room} to the answer; send the part "
                "that the answer may have",
                param="prediction.content",
            )
        return tokens

    def thinking(self, prompt: Sequence[int], *, continues: bool = False) -> Thinking:
        """As :func:`specdec.serve.thinking.thinking_of`."""
        return thinking_of(self._tokenizer, prompt, continues=continues)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            ApiError: a token is outside the vocabulary.
        """
        size = self._engine.target.vocab_size
        if unknown := [token for token in tokens if token >= size]:
            raise ApiError(
                f"token {shown(unknown[0])} is outside the vocabulary [0, {size}); send tokens of this model",
                param="tokens",
            )
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Token ids as the vocabulary's pieces."""
        pieces: list[str] = self._tokenizer.convert_ids_to_tokens(list(tokens))
        return pieces

    def chat(self, fields: ChatRequest | TokenizeRequest) -> list[int]:
        """Token ids of what the chat template makes of a request, up to the point where the answer begins.

        Raises:
            ApiError: there is no chat template, or it refuses a message; or the prompt exceeds the context.
        """
        if not writes_chats(self._tokenizer):
            raise ApiError(
                f"{self._engine.target.name} has no chat template, so messages cannot become a prompt; send a prompt "
                "to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        plain = [_plain(message, place) for place, message in enumerate(fields.messages or ())]
        continues, begins = bool(fields.continue_final_message), fields.add_generation_prompt is not False
        if continues and "tool_calls" in plain[-1]:
            raise ApiError(
                "continue_final_message is true, and the last message has tool_calls, behind which no text goes on; "
                "leave out one of them",
                param="continue_final_message",
            )
        options = dict(fields.chat_template_kwargs or {})
        if own := sorted(_OWN & options.keys()):
            raise ApiError(
                f"chat_template_kwargs holds {own[0]!r}, which this server gives the template; leave it out",
                param="chat_template_kwargs",
            )
        hides = isinstance(fields, ChatRequest) and fields.tool_choice == "none"
        described = [] if hides else [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
        options |= {"add_generation_prompt": begins and not continues, "continue_final_message": continues}
        bounds = self._token_bytes is not None  # else the template may come with a way of its own to tokenize
        options |= {"tokenize": False} if bounds else {"return_dict": True}
        encoded = self._rendered(plain, described, options)
        if bounds:
            self._check_text(encoded, "messages")
            encoded = self._tokenizer(encoded, add_special_tokens=False)
        return self._fitting(list(encoded["input_ids"]), "messages")

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]) -> Any:
        """What the chat template makes of messages and tools; raises ApiError where it refuses them."""
        asked = tools or any(message.keys() & {"tool_calls", "tool_call_id"} for message in messages)
        tries: list[dict[str, Any]] = [{"conversation": messages, **({"tools": tools} if tools else {})}]
        if asked and not self.knows_tools:
            if not self._warned:
                _log.info("the chat template has no place for tools; they are described in the system message")
                self._warned = True
            tries = [{"conversation": as_text(messages, tools, system=system)} for system in (True, False)]
        for number, values in enumerate(tries, 1):
            try:
                return self._tokenizer.apply_chat_template(**values, **options)
            except Exception as error:  # a template is the checkpoint's code and may raise anything
                if number < len(tries):
                    continue
                raise ApiError(
                    f"the chat template of {self._engine.target.name} refuses these messages: {first_line(error)}; "
                    "change them",
                    param="messages",
                ) from error
        raise AssertionError

    def _check_text(self, text: str, param: str) -> None:
        """Raises ApiError for a text that is too long for the context by its length alone, before it is tokenized."""
        if (least := least_tokens(text, self._token_bytes)) >= self.context:
            raise self._too_long(f"at least {least}", param)

    def _fitting(self, tokens: list[int], param: str) -> list[int]:
        if len(tokens) >= self.context:
            raise self._too_long(str(len(tokens)), param)
        return self._engine.encode(tokens)

    def _too_long(self, count: str, param: str) -> ApiError:
        return ApiError(
            f"{param} has {count} tokens, and the model's context holds {self.context} with at least one new token; "
            f"send at most {self.context - 1}",
            param=param,
            code="context_length_exceeded",
        )


def _plain(message: Message, place: int) -> dict[str, Any]:
    """The message as chat templates expect it: its content as one text, the arguments of calls as objects."""
    where = f"messages.{place}"
    if message.content is None and message.role == "user":
        raise ApiError(f"{where} has no content; give a text", param=f"{where}.content")
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": text_of(message.content, f"{where}.content")}
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            return {**call, "function": {**function, "arguments": from_json(function["arguments"])}}
        except ValueError:
            return call  # the model wrote no JSON, or a nest of brackets; the template shows the text unchanged
    return call


@lru_cache(4)
def _names_tools(template: str | None) -> bool:
    """Whether a chat template reads ``tools``."""
    if not isinstance(template, str):
        return False
    try:
        return "tools" in meta.find_undeclared_variables(Environment().parse(template))
    except Exception:  # for example, tags that only transformers adds
        return "tools" in template
