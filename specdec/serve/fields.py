"""The fields of requests, checked by pydantic: strictly typed, and unknown fields are errors unless listed below."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from specdec.errors import shown, unknown
from specdec.serve.errors import ApiError

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Generating",
    "JsonSchema",
    "Message",
    "NamedTool",
    "ResponseFormat",
    "Speculation",
    "StructuredOutputs",
    "TokenizeRequest",
    "Tool",
    "read",
]

Kind = TypeVar("Kind", bound="Fields")

_Stop = Annotated[str, Field(min_length=1)]
_Tokens = list[Annotated[int, Field(ge=0)]]


class Fields(BaseModel):
    """A JSON object with strict types: a text is not taken for a number, and an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI and vLLM that this server accepts and ignores."""
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI and vLLM that this server lacks -> their values that ask for nothing, which it accepts."""


class StreamOptions(Fields):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculation(Fields):
    """How the request is drafted, within the limits that the server's options set.

    Attributes:
        drafter: name of a drafter that ``/v1/models`` lists.
        max_rows: most rows of a step.
        per_step: whether the answer lists each step's drafted and accepted tokens.
        trace: whether a stream's chunks hold each step's tree.
    """

    drafter: str | None = None
    max_rows: int | None = Field(None, ge=1)
    per_step: bool = False
    trace: bool = False


class JsonSchema(Fields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's ``structured_outputs``, of which one is given."""

    ignored = frozenset({"disable_any_whitespace", "disable_additional_properties", "disable_fallback"})

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Field(max_length=1 << 16)] | None = None
    json_object: bool | None = None


class TextPart(Fields):
    model_config = ConfigDict(extra="ignore")

    type: str
    text: str | None = None


class Prediction(Fields):
    type: Literal["content"]
    content: str | list[TextPart]


class Message(Fields):
    model_config = ConfigDict(extra="ignore")  # clients send answers back, with other servers' fields too

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Function(Fields):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class Generating(Fields):
    """The fields that chats and completions share; None stands for OpenAI's default, or the checkpoint's."""

    ignored = frozenset(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    ) | {"request_id"}
    refused: ClassVar = {
        **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), (True,)),
        **dict.fromkeys(("include_stop_str_in_output", "use_beam_search", "return_token_ids"), (False,)),
        **dict.fromkeys(("return_tokens_as_token_ids",), (False,)),
        **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "truncate_prompt_tokens"), ()),
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
        "bad_words": ([],),
        "length_penalty": (1,),
        "priority": (0,),
    }

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, lt=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=64)] | None = None
    stop_token_ids: _Tokens | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=128)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None


class ChatRequest(Generating):
    """The body of ``/v1/chat/completions``."""

    ignored = Generating.ignored | {"include_reasoning"}
    refused: ClassVar = {
        **Generating.refused,
        **dict.fromkeys(("chat_template", "documents"), ()),
        "add_special_tokens": (False,),
        "echo": (False,),
        "modalities": (["text"],),
        **dict.fromkeys(("audio", "functions", "function_call", "web_search_options", "reasoning_effort"), ()),
        "verbosity": ("medium",),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Generating):
    """The body of ``/v1/completions``."""

    refused: ClassVar = {
        **Generating.refused,
        "add_special_tokens": (True,),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: str | list[str] | _Tokens | list[_Tokens]
    logprobs: int | None = Field(None, ge=0, le=20)


class TokenizeRequest(Fields):
    """The body of ``/tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None


class DetokenizeRequest(Fields):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: _Tokens


def read(kind: type[Kind], body: bytes) -> Kind:
    """The checked fields of a body.

    Raises:
        ApiError: the body is no JSON object, or a field does not fit; it names the first such field.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}; send one JSON object", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(f"the body is {shown(values)}; send one JSON object", code="invalid_json")
    values = _served(kind, values)
    for name, inner in (("stream_options", StreamOptions), ("structured_outputs", StructuredOutputs)):
        if isinstance(values.get(name), dict):
            values[name] = _served(inner, values[name])
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _unfit(kind, error) from None


def _served(kind: type[Fields], values: dict[str, Any]) -> dict[str, Any]:
    """The fields that have a value; raises ApiError for one that asks for a feature that this server lacks."""
    for name, nothing in kind.refused.items():
        value = values.get(name)
        if value is not None and value not in nothing:
            raise ApiError(
                f"{name} is {shown(value)}, which this server does not do; leave the field out"
                + "".join(f", or send {json.dumps(one)}" for one in nothing),
                param=name,
                code="unsupported_parameter",
            )
    return {name: value for name, value in values.items() if name not in kind.ignored and name not in kind.refused}


def _unfit(kind: type[Fields], error: ValidationError) -> ApiError:
    """The error of the first field that does not fit; for a union, the error of the member that the value resembles."""
    found = error.errors(include_url=False)
    first = max(found, key=lambda one: len(one["loc"]))
    if all(one["loc"][0] != first["loc"][0] for one in found[:1]):
        first = found[0]
    names = [str(part) for part in first["loc"] if isinstance(part, int) or (part not in _TAGS and "[" not in part)]
    place = ".".join(names)
    if first["type"] == "extra_forbidden":
        known = kind.model_fields if len(names) == 1 else ()
        message = f"{unknown('field', names[-1], known)}" if known else f"there is no field {place}; leave it out"
        return ApiError(message, param=place, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"{place} is missing; the request needs it", param=place, code="missing_required_parameter")
    must = re.sub(r"^\w+ should", "it must", first["msg"])
    return ApiError(f"{place} is {shown(first['input'])}; {must}", param=place, code="invalid_value")


_TAGS = {"str", "int", "float", "bool", "list", "dict", "constrained-str", "NamedTool", "literal"}
