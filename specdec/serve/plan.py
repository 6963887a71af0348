"""Plans: HTTP requests as requests for the scheduler, checked before anything is decoded."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import MinNewTokensLengthLogitsProcessor

from specdec.engine.conversations import answer_end
from specdec.engine.engine import Engine
from specdec.engine.requests import Request
from specdec.engine.text_stream import stop_strings
from specdec.serve.constraints import AtLeast
from specdec.serve.errors import ApiError
from specdec.serve.fields import ChatRequest, CompletionRequest, Generating, NamedTool, Speculation
from specdec.serve.json_grammar import Grammars
from specdec.serve.processors import Penalties, bias_of
from specdec.serve.prompts import Encoder, plain_text
from specdec.serve.structured import Form, Structured
from specdec.settings.sampling_params import SamplingParams

__all__ = ["Plan", "Planner"]

_COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat may fill the context
_EVERY = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # OpenAI's defaults


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request: its prompts and the scheduler's requests.

    Attributes:
        fields: the request's fields.
        prompts: token ids of each prompt.
        requests: the scheduler's requests, ``n`` for each prompt.
        stops: the stop strings.
        form: the form that the answer must have.
    """

    fields: ChatRequest | CompletionRequest
    prompts: list[list[int]]
    requests: list[Request]
    stops: list[str]
    speculation: Speculation
    form: Form = Form()  # noqa: RUF009  (it is frozen)

    @property
    def forced(self) -> str | None:
        """As :attr:`specdec.serve.structured.Form.forced`."""
        return self.form.forced

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: what of the schemas is not followed, where the request allows that."""
        return {"x-specdec-not-followed": self.form.dropped_line} if self.form.dropped else {}

    @property
    def n(self) -> int:
        """The number of answers to each prompt."""
        return self.fields.n or 1

    @property
    def logprobs(self) -> int | None:
        """The number of top tokens listed beside each token; None without log-probabilities."""
        if isinstance(self.fields, ChatRequest):
            return (self.fields.top_logprobs or 0) if self.fields.logprobs else None
        return self.fields.logprobs


class Planner:
    """Makes plans. One thread at a time may use it.

    Args:
        engine: the engine that decodes.
        encoder: makes token ids of prompts.
        grammars: compiles JSON schemas.
        defaults: temperature, top_p, top_k, min_p and repetition_penalty where they differ from OpenAI's defaults.
        check_speculation: raises ApiError for a drafter or rows that the server does not allow.
    """

    def __init__(
        self,
        engine: Engine,
        encoder: Encoder,
        grammars: Callable[[], Grammars],
        defaults: dict[str, Any],
        check_speculation: Callable[[Speculation], dict[str, Any]],
    ) -> None:
        self._engine, self._encoder, self._structured = engine, encoder, Structured(grammars)
        self._defaults = {**_EVERY, **defaults}
        self._check_speculation = check_speculation
        self._chat_end = answer_end(engine.tokenizer)

    def chat(self, fields: ChatRequest) -> Plan:
        """The plan of a chat.

        Raises:
            ApiError, ConfigError, PromptError: a field has a value that cannot be followed.
        """
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError("top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
        choice = fields.tool_choice
        tools = None if choice == "none" else fields.tools
        if not fields.tools and (choice == "required" or isinstance(choice, NamedTool)):
            raise ApiError("tool_choice asks for a call, and there are no tools; give tools", param="tool_choice")
        continues, begins = bool(fields.continue_final_message), fields.add_generation_prompt is not False
        if continues and fields.add_generation_prompt:
            raise ApiError(
                "continue_final_message and add_generation_prompt are both true; an answer goes on with the last "
                "message, or begins one; give one of them",
                param="continue_final_message",
            )
        more = fields.chat_template_kwargs
        prompt = self._encoder.chat(fields.messages, tools, continues=continues, begins=begins, more=more)
        budget = fields.max_completion_tokens or fields.max_tokens
        room = self._engine.target.context_length - len(prompt)
        return self._plan(fields, [prompt], budget or room, chat=True)

    def completion(self, fields: CompletionRequest) -> Plan:
        """The plan of a completion; raises as :meth:`chat` does."""
        prompts = [self._encoder.prompt(prompt) for prompt in _prompts(fields.prompt)]
        return self._plan(fields, prompts, fields.max_tokens or _COMPLETION_TOKENS)

    def _plan(
        self,
        fields: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        budget: int,
        *,
        chat: bool = False,
    ) -> Plan:
        stops = stop_strings(fields.stop or ())
        ends = {*(fields.stop_token_ids or ())}
        if chat and self._chat_end is not None and not fields.ignore_eos:
            ends.add(self._chat_end)  # else the answer would go on behind the end of its turn
        speculation = fields.speculation or Speculation.model_validate({})
        least = fields.min_tokens or 0
        options: dict[str, Any] = {"stop": stops, "stop_token_ids": ends, "min_tokens": least}
        options |= self._check_speculation(speculation)
        if fields.ignore_eos:
            options["eos_ids"] = frozenset()
        if fields.prediction is not None:
            text = plain_text(fields.prediction.content, "prediction.content", between="") or None
            options["prediction"] = None if text is None else self._encoder.prediction(text)
        if least > budget:
            raise ApiError(
                f"min_tokens is {least}, and the answer has at most {budget} tokens; lower it, or raise max_tokens",
                param="min_tokens",
                code="invalid_value",
            )
        form = self._structured.form(fields)
        grammar = form.grammar
        if grammar is not None and not fields.ignore_eos:
            ends |= grammar.ends  # a text that a grammar ends is ended
        sampling = self._sampling(fields)
        bias = bias_of(fields.logit_bias, self._engine.target.vocab_size) if fields.logit_bias else None
        plan = Plan(fields, prompts, [], stops, speculation, form)
        options["logprobs"] = plan.logprobs
        for prompt in prompts:
            chain: list[Any] = [bias] if bias is not None else []
            if fields.presence_penalty or fields.frequency_penalty:
                chain.append(Penalties(len(prompt), fields.presence_penalty or 0.0, fields.frequency_penalty or 0.0))
            closing = sorted((frozenset() if fields.ignore_eos else self._engine.target.eos_ids) | ends)
            if least and closing:
                device = str(self._engine.target.head_device)
                chain.append(
                    MinNewTokensLengthLogitsProcessor(len(prompt), least, closing, device)
                    if grammar is None
                    else AtLeast(grammar, least, closing)
                )
            elif grammar is not None:
                chain.append(grammar)
            for number in range(plan.n):
                own = replace(sampling, seed=sampling.seed + number)
                plan.requests.append(Request(prompt, budget, own, logits_processor=chain, **options))
        return plan

    def _sampling(self, fields: Generating) -> SamplingParams:
        values = {name: getattr(fields, name) for name in _EVERY}
        values = {name: self._defaults[name] if value is None else value for name, value in values.items()}
        values["top_k"] = max(0, values["top_k"])
        seed = secrets.randbits(32) if fields.seed is None else fields.seed
        return SamplingParams(**values, seed=seed)


def _prompts(prompt: str | Sequence[Any]) -> list[Any]:
    """The prompts of a completion, each a text or a list of token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise ApiError("prompt is an empty list; give at least one prompt", param="prompt")
    return list(prompt)
