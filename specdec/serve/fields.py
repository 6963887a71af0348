"""The fields of requests: strictly typed models, and the fields of other servers that are accepted or refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from specdec.serve.field_types import STOP_TOKENS, Biases, Bounded, Int, Prompts, Stops, Tokens, bounded

__all__ = [
    "Body",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Fields",
    "Generating",
    "JsonSchema",
    "Message",
    "NamedTool",
    "ResponseFormat",
    "Speculation",
    "StreamOptions",
    "StructuredOutputs",
    "TokenizeRequest",
    "Tool",
]


class Fields(BaseModel):
    """A JSON object with strict types: a text is not taken for a number, and an unknown field is an error.

    An unknown field that is null or empty asks for nothing, and so does an optional one. With ``ignored`` in the
    validation context, a list, unknown fields are left out and their names are added to it.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI and vLLM that this server accepts and ignores."""
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI and vLLM that this server lacks -> their values that ask for nothing, which it accepts."""
    why: ClassVar[dict[str, str]] = {"suffix": "and fill-in-the-middle is not served here"}
    """Why a field of those is refused, where more is to be said than that."""
    keeps_empty: ClassVar[bool] = True
    """Whether an empty text or list is the value of an optional field, in place of nothing."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict) or cls.model_config.get("extra") == "ignore":
            return values
        known = {one.alias or name: one for name, one in cls.model_fields.items()}
        kept, unknown = dict[str, Any](), list[str]()
        for name, value in values.items():
            if name in known:
                if known[name].is_required() or not (value is None or (is_empty(value) and not cls.keeps_empty)):
                    kept[name] = value
            elif not is_empty(value) and name not in cls.ignored:
                unknown.append(name)
        if info.context is not None and unknown:
            info.context["ignored"] += unknown
        elif unknown:  # an error for one of them, not for each of a million
            kept[unknown[0]] = values[unknown[0]]
        return kept


def is_empty(value: Any) -> bool:
    """Whether a value asks for nothing: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


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
    max_rows: Int | None = Field(None, ge=1)
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


class Prediction(Fields):
    type: Literal["content"]
    content: str | Bounded[dict[str, Any]]


class Message(Fields):
    model_config = ConfigDict(extra="ignore")  # clients send answers back, with other servers' fields too

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Bounded[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Bounded[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


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


class Body(Fields):
    """The body of a request."""

    model: str | None = None


class Generating(Body):
    """The fields that chats and completions share; None stands for OpenAI's default, or the checkpoint's."""

    ignored = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    ) | {"request_id", "include_reasoning"}
    refused: ClassVar = {
        **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), (True,)),
        **dict.fromkeys(("include_stop_str_in_output", "use_beam_search", "return_token_ids"), (False,)),
        **dict.fromkeys(("return_tokens_as_token_ids",), (False,)),
        **dict.fromkeys(("allowed_token_ids", "truncate_prompt_tokens"), ()),
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "bad_words"), ()),
        "length_penalty": (1,),
        "priority": (0,),
    }
    keeps_empty = False

    max_tokens: Int | None = Field(None, ge=-1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, lt=1)
    seed: Int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stops | None = None
    stop_token_ids: Annotated[Tokens, bounded(STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = Field(None, ge=0)
    n: Int | None = Field(None, ge=1, le=128)
    logit_bias: Biases | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)  # beyond, a score may exceed float32's numbers
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None
    cache_salt: str | None = Field(None, max_length=256)
    prompt_logprobs: Int | None = Field(None, ge=0, le=20)


class ChatRequest(Generating):
    """The body of ``/v1/chat/completions``."""

    refused: ClassVar = {
        **Generating.refused,
        **dict.fromkeys(("chat_template", "documents"), ()),
        "add_special_tokens": (False,),
        "echo": (False,),
        "modalities": (["text"],),
        **dict.fromkeys(("audio", "functions", "function_call", "web_search_options"), ()),
        "verbosity": ("medium",),
    }

    messages: Bounded[Message] = Field(min_length=1)
    max_completion_tokens: Int | None = Field(None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=20)
    tools: Bounded[Tool] | None = None
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
        "suffix": (),
    }

    prompt: Prompts
    echo: bool | None = None
    logprobs: Int | None = Field(None, ge=0, le=20)


class TokenizeRequest(Body):
    """The body of ``/tokenize``: a prompt or messages, with vLLM's fields, or llama-server's ``content``."""

    refused: ClassVar = {
        **dict.fromkeys(("chat_template", "mm_processor_kwargs"), ()),
        "parse_special": (True,),
    }

    prompt: str | None = None
    content: str | None = None
    messages: Bounded[Message] | None = Field(None, min_length=1)
    tools: Bounded[Tool] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    tokens: Tokens
