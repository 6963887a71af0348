"""Plans: HTTP requests as requests for the scheduler, checked before anything is decoded."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import MinNewTokensLengthLogitsProcessor

from specdec.engine.conversations import answer_end
from specdec.engine.engine import Engine
from specdec.engine.requests import Request
from specdec.engine.text_stream import stop_strings
from specdec.serve.constraints import Anything, AtLeast, PromptFirst, ends_behind
from specdec.serve.errors import ApiError
from specdec.serve.fields import ChatRequest, CompletionRequest, Generating, NamedTool, Speculation
from specdec.serve.json_grammar import Grammars
from specdec.serve.parts import text_of
from specdec.serve.processors import Penalties, bias_of
from specdec.serve.prompts import Encoder
from specdec.serve.structured import Form, Structured
from specdec.serve.thinking import Thinking
from specdec.settings.sampling_params import SamplingParams

__all__ = ["Limits", "Plan", "Planner"]

_GREEDY = 1e-5  # temperatures below, at which scores may exceed float32's numbers, take the likeliest token, as in vLLM
_COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat may fill the context
_EVERY = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # OpenAI's defaults


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server allows requests.

    Attributes:
        context: most tokens of a prompt and its answer.
        check_answers: raises ApiError for a number of answers for which the server has no place.
        speculation: options for drafting; raises ApiError for a drafter or rows that the server does not allow.
    """

    context: int
    check_answers: Callable[[int], None]
    speculation: Callable[[Generating], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request: its prompts and the scheduler's requests.

    Attributes:
        fields: the request's fields.
        prompts: token ids of each prompt.
        requests: the scheduler's requests, ``n`` for each prompt; none where the answers are to have no token.
        stops: the stop strings.
        form: the form that the answer must have.
        thinking: how the answer begins.
        ignored: names of the request's fields that were not followed.
        empty: whether the answers are to have no token.
        answer: makes the answer of the request's protocol, an :class:`specdec.serve.answers.Answer`.
    """

    fields: ChatRequest | CompletionRequest
    prompts: list[list[int]]
    requests: list[Request]
    stops: list[str]
    speculation: Speculation
    form: Form = Form()  # noqa: RUF009  (it is frozen)
    thinking: Thinking = None
    ignored: list[str] = field(default_factory=list)
    empty: bool = False
    answer: Callable[..., Any] | None = None

    @property
    def forced(self) -> str | None:
        """As :attr:`specdec.serve.structured.Form.forced`."""
        return self.form.forced

    @property
    def prompt_tops(self) -> int | None:
        """The number of top tokens listed beside each token of the prompt; None without their log-probabilities."""
        given = self.fields.prompt_logprobs
        return self.logprobs if given is None and getattr(self.fields, "echo", None) else given

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
        limits: what the server allows.
    """

    def __init__(
        self,
        engine: Engine,
        encoder: Encoder,
        grammars: Callable[[], Grammars],
        defaults: dict[str, Any],
        limits: Limits,
    ) -> None:
        self._engine, self._encoder, self._grammars = engine, encoder, grammars
        self._defaults, self._limits = {**_EVERY, **defaults}, limits
        self._chat_end = answer_end(engine.tokenizer)

    def chat(self, fields: ChatRequest) -> Plan:
        """The plan of a chat.

        Raises:
            ApiError, ConfigError, PromptError: a field has a value that cannot be followed.
        """
        self._limits.check_answers(fields.n or 1)
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError("top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
        choice = fields.tool_choice
        if not fields.tools and (choice == "required" or isinstance(choice, NamedTool)):
            raise ApiError("tool_choice asks for a call, and there are no tools; give tools", param="tool_choice")
        if fields.continue_final_message and fields.add_generation_prompt:
            raise ApiError(
                "continue_final_message and add_generation_prompt are both true; an answer goes on with the last "
                "message, or begins one; give one of them",
                param="continue_final_message",
            )
        budget = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        return self._plan(fields, [self._encoder.chat(fields)], budget, chat=True)

    def completion(self, fields: CompletionRequest) -> Plan:
        """The plan of a completion; raises as :meth:`chat` does."""
        given = _prompts(fields.prompt)
        self._limits.check_answers(len(given) * (fields.n or 1))
        prompts = [self._encoder.prompt(prompt) for prompt in given]
        return self._plan(fields, prompts, _COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens)

    def _plan(
        self,
        fields: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        budget: int | None,
        *,
        chat: bool = False,
    ) -> Plan:
        """The plan of prompts; a budget of None or -1 is what the context leaves."""
        stops = stop_strings(fields.stop or ())
        ends = {*(fields.stop_token_ids or ())}
        if chat and self._chat_end is not None and not fields.ignore_eos:
            ends.add(self._chat_end)  # else the answer would go on behind the end of its turn
        _check_prompt_logprobs(fields)
        speculation = fields.speculation or Speculation.model_validate({})
        options: dict[str, Any] = {"stop": stops, "stop_token_ids": ends, **self._limits.speculation(fields)}
        if fields.ignore_eos:
            options["eos_ids"] = frozenset()
        rooms = [self._limits.context - len(prompt) for prompt in prompts]
        if fields.prediction is not None:
            text = text_of(fields.prediction.content, "prediction.content", between="")
            options["prediction"] = self._encoder.prediction(text, min(rooms)) if text else None
        budgets = [room if budget in (None, -1) else min(budget or 0, room) for room in rooms]
        thinking: Thinking = None
        if isinstance(fields, ChatRequest):
            thinking = self._encoder.thinking(prompts[0], continues=bool(fields.continue_final_message))
        form = Structured(self._grammars, thinking).form(fields)
        grammar = form.grammar
        if grammar is not None and not fields.ignore_eos:
            ends |= grammar.ends  # a text that a grammar ends is ended
        closing = sorted((frozenset() if fields.ignore_eos else self._engine.target.eos_ids) | ends)
        options["min_tokens"] = least = self._least(fields, min(budgets), closing)
        plan = Plan(fields, prompts, [], stops, speculation, form, thinking, empty=budget == 0)
        options["logprobs"] = plan.logprobs
        if plan.prompt_tops is not None:
            options |= {"eos_ids": frozenset(), "stop_token_ids": ()}  # which the prompt may hold
            options["logprobs"] = max(plan.prompt_tops, plan.logprobs or 0)
        elif plan.empty:
            return plan
        sampling = self._sampling(fields)
        for prompt, own_budget in zip(prompts, budgets, strict=True):
            chain, own_options = self._chain(plan, prompt, least, closing), dict(options)
            if plan.prompt_tops is not None:
                behind = len(prompt) - 1
                own_options |= {"stop_when": ends_behind(len(prompt), closing), "prediction": prompt[1:] or None}
                own_options["min_tokens"] = behind + least
                prompt, own_budget = prompt[:1], max(1, behind + own_budget)
            for number in range(plan.n):
                own = replace(sampling, seed=sampling.seed + number)
                plan.requests.append(Request(prompt, own_budget, own, logits_processor=chain, **own_options))
        return plan

    def _chain(self, plan: Plan, prompt: Sequence[int], least: int, closing: Sequence[int]) -> list[Any]:
        """The processors of a prompt's answers."""
        fields, grammar, target = plan.fields, plan.form.grammar, self._engine.target
        chain: list[Any] = [bias_of(fields.logit_bias, target.vocab_size)] if fields.logit_bias else []
        if fields.presence_penalty or fields.frequency_penalty:
            chain.append(Penalties(len(prompt), fields.presence_penalty or 0.0, fields.frequency_penalty or 0.0))
        if plan.prompt_tops is not None:
            chain.append(PromptFirst(prompt, AtLeast(grammar or Anything(), least, closing)))
        elif least and closing and grammar is None:
            device = str(target.head_device)
            chain.append(MinNewTokensLengthLogitsProcessor(len(prompt), least, [*closing], device))
        elif grammar is not None:
            chain.append(AtLeast(grammar, least, closing) if least and closing else grammar)
        return chain

    def _least(self, fields: Generating, budget: int, closing: Sequence[int]) -> int:
        """The answers' least number of tokens; raises ApiError where no answer can have it."""
        least = fields.min_tokens or 0
        if least > budget:
            raise ApiError(
                f"min_tokens is {least}, and the answer has at most {budget} tokens, by max_tokens or by the context; "
                "lower it",
                param="min_tokens",
            )
        size = self._engine.target.vocab_size
        if least and sum(0 <= token < size for token in closing) == size:
            raise ApiError(
                f"min_tokens is {least}, and stop_token_ids holds every token, so that none may come first; leave one "
                "of them out",
                param="stop_token_ids",
            )
        return least

    def _sampling(self, fields: Generating) -> SamplingParams:
        values = {name: getattr(fields, name) for name in _EVERY}
        values = {name: self._defaults[name] if value is None else value for name, value in values.items()}
        values["top_k"] = max(0, values["top_k"])
        if values["temperature"] < _GREEDY:
            values["temperature"] = 0.0
        seed = secrets.randbits(32) if fields.seed is None else fields.seed
        return SamplingParams(**values, seed=seed)


def _check_prompt_logprobs(fields: ChatRequest | CompletionRequest) -> None:
    """Raises ApiError for what log-probabilities of prompts do not go with."""
    asked = "prompt_logprobs" if fields.prompt_logprobs is not None else None
    if isinstance(fields, CompletionRequest) and fields.echo and fields.logprobs is not None:
        asked = asked or "logprobs"
    if asked and (fields.stream or fields.prediction is not None):
        other = "stream" if fields.stream else "prediction"
        raise ApiError(
            f"{asked} asks for log-probabilities of the prompt, which do not go with {other}; leave one of them out",
            param=asked,
        )


def _prompts(prompt: str | Sequence[Any]) -> list[Any]:
    """The prompts of a completion, each a text or a list of token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise ApiError("prompt is an empty list; give at least one prompt", param="prompt")
    return list(prompt)
