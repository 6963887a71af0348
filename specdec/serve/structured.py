"""Structured output: what a request asks of its answer's form, as one grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from llguidance.gbnf_to_lark import any_to_lark
from pydantic_core import from_json

from specdec.errors import first_line, shown
from specdec.serve.errors import ApiError
from specdec.serve.fields import ChatRequest, Generating, NamedTool, ResponseFormat, StructuredOutputs, Tool
from specdec.serve.json_grammar import Grammars, JsonGrammar, NoGrammar
from specdec.serve.json_places import Unfollowed, located, without
from specdec.serve.json_schema import prepared
from specdec.serve.patterns import bounded
from specdec.serve.thinking import Thinking

__all__ = ["Form", "Structured"]

MOST_CALLS = 16
"""Calls in one answer, where a call is required and several are allowed."""

_LINE = 2048  # characters of a header
_MOST_DROPPED = 64  # keywords that a schema may lose


@dataclass(frozen=True, slots=True)
class Form:
    """The form that an answer must have.

    Attributes:
        grammar: the grammar; None for any text.
        forced: name of the function that the answer must call; ``""`` where the model chooses it; None where no call is
            required.
        dropped: what of the schemas is not followed, each as ``PLACE KEYWORD``; only with ``strict: false``.
    """

    grammar: JsonGrammar | None = None
    forced: str | None = None
    dropped: Sequence[str] = ()

    @property
    def dropped_line(self) -> str:
        """What is not followed, in one line of ASCII as headers take it."""
        line = quote("; ".join(self.dropped), safe=" #$/;.,:~")
        return line if len(line) <= _LINE else f"{line[:_LINE]}... ({len(self.dropped)} in all)"


class Structured:
    """Reads the forms of requests. One thread at a time may use it.

    Args:
        grammars: makes grammars; called once a request needs one.
        thinking: what may stand before the form.
    """

    def __init__(self, grammars: Callable[[], Grammars], thinking: Thinking = None) -> None:
        self._grammars, self._thinking = grammars, thinking

    def form(self, fields: Generating) -> Form:
        """The form of a request's answer; a call that is required comes before other forms.

        Raises:
            ApiError: it cannot be followed; the message names the place and the keyword.
        """
        if isinstance(fields, ChatRequest) and fields.tool_choice not in (None, "none", "auto"):
            return self._call(fields)
        form, outputs = fields.response_format, fields.structured_outputs
        if outputs is None:
            return Form() if form is None or form.type == "text" else self._of_format(form)
        if form is not None and form.type != "text":
            raise ApiError(
                "response_format and structured_outputs both say what form the answer has; give one of them",
                param="structured_outputs",
            )
        return self._of_outputs(outputs)

    def of_schema(self, schema: Any) -> JsonGrammar:
        """The grammar of JSON that fits a schema; raises as :meth:`form` does."""
        grammar = self._of_rules([_Rule(schema, "schema", strict=True)]).grammar
        assert grammar is not None
        return grammar

    def _of_format(self, form: ResponseFormat) -> Form:
        if form.type == "json_object":
            return Form(self._made("response_format", {"type": "object"}))
        if form.json_schema is None:
            raise ApiError(
                "response_format is of type 'json_schema' and has no json_schema; give its name and schema",
                param="response_format.json_schema",
                code="missing_required_parameter",
            )
        asked, param = form.json_schema, "response_format.json_schema.schema"
        return self._of_rules([_Rule(asked.schema_, param, strict=asked.strict is not False)])

    def _of_outputs(self, asked: StructuredOutputs) -> Form:
        given = [name.rstrip("_") for name, value in asked if value is not None and value is not False]
        if len(given) != 1:
            raise ApiError(
                f"structured_outputs holds {', '.join(given) or 'nothing'}; give one of json, regex, choice, grammar "
                "and json_object",
                param="structured_outputs",
            )
        param = f"structured_outputs.{given[0]}"
        if asked.json_ is not None:
            return self._of_rules([_Rule(_parsed(asked.json_, param), param, strict=True)])
        if asked.choice is not None:
            return Form(self._made(param, f"start: {' | '.join(map(json.dumps, asked.choice))}"))
        if asked.regex is not None:
            return Form(self._made(param, f"start: /{_of_pattern(asked.regex, param)}/"))
        if asked.grammar is not None:
            return Form(self._made(param, _lark(asked.grammar, param)))
        return Form(self._made(param, {"type": "object"}))

    def _call(self, fields: ChatRequest) -> Form:
        """The form of an answer that must be a call."""
        choice, tools = fields.tool_choice, fields.tools or []
        if choice == "required":
            names = [json.dumps(f'{{"name":{json.dumps(tool.function.name)},"arguments":') for tool in tools]
            calls = " | ".join(f'{name} @r{place} "}}"' for place, name in enumerate(names))
            many = f' | "[" call ("," call){{0,{MOST_CALLS - 1}}} "]"' if fields.parallel_tool_calls else ""
            rules = [_parameters(tool, place) for place, tool in enumerate(tools)]
            return self._of_rules(rules, f"call{many}\ncall: {calls}", "")
        assert isinstance(choice, NamedTool)
        name = choice.function.name
        for place, tool in enumerate(tools):
            if tool.function.name == name:
                return self._of_rules([_parameters(tool, place)], forced=name)
        known = ", ".join(tool.function.name for tool in tools)
        raise ApiError(f"tool_choice names {shown(name)}, and the tools are {known}; name one", param="tool_choice")

    def _of_rules(self, rules: list[_Rule], start: str = "@r0", forced: str | None = None) -> Form:
        """The form of schemas, joined by ``start``; where they allow it, without what cannot be followed."""
        while True:
            try:
                grammar = self._grammars().of(*(rule.schema for rule in rules), start=start, thinking=self._thinking)
            except NoGrammar as error:
                if any(rule.mend(self._grammars().problem) for rule in rules):
                    continue
                raise ApiError(
                    f"{rules[0].param} cannot be followed: {error}; change it", param=rules[0].param
                ) from None
            return Form(grammar, forced, [one for rule in rules for one in rule.dropped])

    def _made(self, param: str, *rules: Any) -> JsonGrammar:
        try:
            return self._grammars().of(*rules, thinking=self._thinking)
        except NoGrammar as error:
            raise ApiError(
                f"{param} cannot be followed: {error}; change it", param=param, code="invalid_grammar"
            ) from None


class _Rule:
    """A client's schema, and what of it is followed.

    Args:
        schema: the schema.
        param: where the request has it.
        strict: whether all of it is to be followed.

    Attributes:
        schema: the part that is followed.
        dropped: the keywords that are not, each as ``PLACE KEYWORD``.

    Raises:
        ApiError: a part of it cannot be followed, and that is not allowed.
    """

    def __init__(self, schema: Any, param: str, *, strict: bool) -> None:
        self.param, self._strict = param, strict
        self.dropped: list[str] = []
        try:
            self.schema = prepared(schema, self._drop)
        except Unfollowed as error:
            raise _refused(error, param) from None

    def mend(self, problem: Callable[[dict[str, Any]], str | None]) -> bool:
        """Leave out a keyword for which no grammar can be made; False where one can be made."""
        error = located(self.schema, problem)
        if error is None:
            return False
        try:
            self._drop(error)
        except Unfollowed as refused:
            raise _refused(refused, self.param) from None
        without(self.schema, error)
        return True

    def _drop(self, error: Unfollowed) -> None:
        if self._strict or not error.droppable or len(self.dropped) == _MOST_DROPPED:
            raise error
        self.dropped.append(f"{self.param}{error.place} {error.keyword}")


def _parameters(tool: Tool, place: int) -> _Rule:
    """The schema of a tool's arguments."""
    function = tool.function
    param = f"tools.{place}.function.parameters"
    return _Rule(function.parameters or {"type": "object"}, param, strict=function.strict is not False)


def _refused(error: Unfollowed, param: str) -> ApiError:
    """The answer to a schema that cannot be followed."""
    remedy = "leave it out" if error.droppable else "change the schema"
    if error.droppable and not param.startswith("structured_outputs"):
        remedy += ", or say strict: false, and it is not followed"
    keyword = f"{error.keyword} " if error.keyword else ""
    return ApiError(
        f"{param} has {keyword}at {error.place}, which cannot be followed: {error}; {remedy}",
        param=param.partition(".")[0],
        code="invalid_json_schema",
    )


def _parsed(schema: Any, param: str) -> Any:
    """A schema that may be given as text."""
    if not isinstance(schema, str):
        return schema
    try:
        return from_json(schema, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"{param} is no JSON: {error}; give a schema", param=param) from None


def _of_pattern(pattern: str, param: str) -> str:
    """A pattern of a whole answer, within slashes."""
    try:
        bounded(pattern)
    except ValueError as error:
        raise ApiError(
            f"{param} cannot be followed: {error}; shorten it", param=param, code="invalid_grammar"
        ) from None
    return re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)


def _lark(grammar: str, param: str) -> str:
    """A grammar in llguidance's variant of Lark, from that or from GBNF."""
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises whatever its parsing meets
        raise ApiError(
            f"{param} cannot be followed: {first_line(error)}; give a grammar in Lark's form or in GBNF",
            param=param,
            code="invalid_grammar",
        ) from None
