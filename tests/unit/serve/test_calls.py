"""Calls that a model marks in its text are the same however the text comes in pieces."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from specdec import Engine
from specdec.serve import call_reading
from specdec.serve.calls import CallReader, MessageReader
from specdec.serve.styles import STYLES, style_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
OTHER = '<tool_call>{"name": "now", "parameters": {}}</tool_call>'


def written(arguments: Any) -> str:
    """A call of ``f`` in marks."""
    return f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"


def read(pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and names and arguments of the calls in their order, after checking that each may come in pieces."""
    found = [_read(pieces, CallReader(streams=streams, **options)) for streams in (False, True)]
    assert found[0] == found[1]
    content, calls, _ = found[0]
    return content, [(name, json.loads(arguments, parse_constant=refuse)) for name, arguments in calls]


def _read(pieces: list[str], reader: CallReader) -> tuple[str, list[tuple[str, str]], bool]:
    content, calls = "", list[list[str]]()
    for number, piece in enumerate(pieces):
        for delta in reader.read(piece, number == len(pieces) - 1):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                assert (
                    ("id" in call) == ("type" in call) == ("name" in call["function"]) == (call["index"] == len(calls))
                )
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    assert reader.count == len(calls)
    return content, [(name, arguments) for name, arguments in calls], reader.broken


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        (CALL, "", [("add", {"a": 1, "b": [2, 3]})]),
        (f"Let me see.\n{CALL}\n{OTHER}", "Let me see.\n", [("add", {"a": 1, "b": [2, 3]}), ("now", {})]),
        (f"\n {CALL}\n\n{OTHER} \nDone.\n", "Done.\n", [("add", {"a": 1, "b": [2, 3]}), ("now", {})]),
        (f"{OTHER}\n<tool_call>none</tool_call>", "<tool_call>none</tool_call>", [("now", {})]),
        ("  ", "  ", []),
        ("no call at all, 1 < 2", "no call at all, 1 < 2", []),
        ("<tool_call>not JSON</tool_call> and more", "<tool_call>not JSON</tool_call> and more", []),
        ('cut <tool_call>{"name": "ad', 'cut <tool_call>{"name": "ad', []),
        ("ends as a mark begins <tool_", "ends as a mark begins <tool_", []),
        (written({"text": "a </tool_call> b"}), "", [("f", {"text": "a </tool_call> b"})]),
        (written({"text": '\\"</tool_call>\\'}), "", [("f", {"text": '\\"</tool_call>\\'})]),
        (written({"text": f"{CALL} {OTHER}"}) + OTHER, "", [("f", {"text": f"{CALL} {OTHER}"}), ("now", {})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "", [("f", {"a": "x\ny"})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", {})]),
        ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>', "", [("f", {}), ("g", {})]),
        (f'<tool_call>"open</tool_call> {OTHER}', '<tool_call>"open</tool_call> ', [("now", {})]),
        *((text, text, []) for text in map(written, ([1], "x", 5, float("nan"), {"a": float("inf")}))),
    ],
)
def test_marked_calls_do_not_depend_on_the_pieces(text: str, content: str, called: list[Any]) -> None:
    assert read([text], marked=True) == (content, called)
    assert read([*text, ""], marked=True) == (content, called)
    for cut in range(1, len(text)):
        assert read([text[:cut], text[cut:]], marked=True) == (content, called)


def test_a_nest_of_brackets_is_no_call_and_no_failure() -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + "[" * 50_000 + "}</tool_call>"
    assert read([text], marked=True) == (text, [])
    text = '<tool_call>{"name": "f", "arguments": {"a": 1e999, "b": ' + "9" * 5_000 + "}}</tool_call>"
    assert read([text], marked=True) == (text, [])


@pytest.mark.parametrize(
    ("arguments", "content", "given"),
    [
        ('{"a": 1, "b": NaN}}', "NaN}}", {"a": 1}),
        ('{"a": 1e5, "b": 1e400, "c": 2}}', '1e400, "c": 2}}', {"a": 1e5}),
        ('{"a": "x" "y"}}', '"y"}}', {"a": "x"}),
        ('{"a": [1, {"b": "c"}, }}', "}}", {"a": [1, {"b": "c"}]}),
        ('{"a": {"b": "x\ny\\d \\u12"}}}', None, {"a": {"b": "x\ny\\d \\u12"}}),
        ('{"a": "\\ud83d\\ude00 \\ud83d \\ude00 \\u00e9"}}', None, {"a": "\U0001f600 \\ud83d \\ude00 é"}),
        ('{"a": "' + "[" * 300 + '", "b": ' + "[" * 300, "[" * 100, {"a": "[" * 300}),
    ],
)
def test_arguments_that_break_off_are_closed_and_the_rest_is_content(
    arguments: str, content: str | None, given: Any
) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    rest = "" if content is None else f"{content}}}</tool_call>"
    for pieces in ([text], [*text, ""], *([text[:cut], text[cut:]] for cut in range(1, len(text), 7))):
        said, calls = read(pieces, marked=True)
        assert calls == [("f", given)]
        assert said.endswith(rest)
        assert text.endswith(said)
        assert _read(pieces, CallReader(marked=True))[2] == (content is not None)


def test_arguments_are_given_out_while_they_come() -> None:
    """Each piece of a text reaches the client with the piece in which it came; what may be an escape waits."""
    text = '<tool_call>{"name": "f", "arguments": {"a": "one \\n two", "b": [10, true]}}</tool_call>'
    reader, given = CallReader(marked=True, streams=True), list[str]()
    for character in text:
        found = reader.read(character, False)
        given += [call["function"]["arguments"] for delta in found for call in delta["tool_calls"]]
    expected = ['{"a": "o', *"ne ", "\\n", *" two", '"', ', "b": [10', ", true]", "}"]
    assert given == expected


def test_arguments_before_the_name_or_in_a_text_come_as_a_whole() -> None:
    for call in ('{"arguments": {"a": 1}, "name": "f"}', '{"name": "f", "arguments": "{\\"a\\": 1}"}'):
        reader = CallReader(marked=True, streams=True)
        deltas = [delta for character in f"<tool_call>{call}" for delta in reader.read(character, False)]
        (one,) = deltas
        assert one["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_each_character_of_a_call_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted:
        looked = 0

        def match(self, text: str, at: int) -> Any:
            found = run.match(text, at)
            assert found is not None
            Counted.looked += len(found[0])
            assert len(text) - at < 40
            return found

    run = call_reading._RUN
    monkeypatch.setattr(call_reading, "_RUN", Counted())
    text = written({"text": "x" * 20_000})
    reader = CallReader(marked=True, streams=True)
    for character in text:
        reader.read(character, False)
        assert reader._reading is None or len(reader._reading._text) < 60
    assert Counted.looked <= len(text)


def test_text_is_text_where_no_calls_are_looked_for() -> None:
    assert read([CALL[:9], CALL[9:]]) == (CALL, [])


@pytest.mark.parametrize("forced", ["add", ""])
def test_a_forced_call_is_an_object_wherever_the_text_ends(forced: str) -> None:
    arguments = '{"a":1,"b":["x y",{"c":null}]}'
    text = arguments if forced else f'{{"name":"add","arguments":{arguments}}}'
    assert read([text], forced=forced) == ("", [("add", json.loads(arguments))])
    assert _read([*text, ""], CallReader(forced, streams=True))[1] == [("add", arguments)]
    for cut in range(len(text)):
        found = read([text[:cut]], forced=forced)
        assert found == read([*text[:cut], ""], forced=forced)
        assert found == (text[:cut], []) if not found[1] else not found[0]
        assert found[1] or not forced


def begins(part: Any, whole: Any) -> bool:
    """Whether a value may be the beginning of another."""
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(begins, part, whole))
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and begins(value, whole[key]) for key, value in part.items())
    return bool(part == whole)


QWEN_CODER = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}{% for k, v in c.function.arguments | items %}"
    "{{ '<parameter=' + k + '>\\n' }}{{ v if v is string else v | tojson if v is mapping or v is sequence "
    "else v | string }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}\n{% endfor %}"
)
"""A chat as Qwen3-Coder's template writes calls: texts as they are, Python's words for true and null."""

ARGUMENTS: dict[str, Any] = {
    "text": 'a </tool_call> "b" \\ {[ ;\nsecond </parameter> line [TOOL_CALLS] ünï',
    "count": 5,
    "share": 0.5,
    "yes": True,
    "none": None,
    "list": [1, {"b": "}"}],
    "object": {"a": {"b": ["]"]}},
    "number_as_text": "5",
}
KINDS = {"text": "string", "number_as_text": "string", "yes": "boolean", "none": ["null", "integer"]}
SCHEMA = {"properties": {key: {"type": KINDS[key]} if key in KINDS else {} for key in ARGUMENTS}}


def written_by(template: str, calls: list[tuple[str, Any]], tokenizer: Any) -> str:
    """Calls as a template writes them: what follows the same message without calls."""
    made = [
        {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": made}]
    text: str = tokenizer.apply_chat_template(talk, chat_template=template, tokenize=False)
    before: str = tokenizer.apply_chat_template(
        talk[:1], chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert text.startswith(before)
    return text[len(before) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "end"),
    [("chatml", "<|im_end|>\n"), ("llama3", "<|eot_id|>"), ("mistral", "<|end|>"), ("", "\n")],
)
def test_a_call_that_a_template_writes_is_read_back_in_all_cuts(tiny_engine: Engine, name: str, end: str) -> None:
    folder = files("specdec") / "assets" / "chat_templates"
    template = (folder / f"{name}.jinja").read_text() if name else QWEN_CODER
    style = style_of(template)
    assert style == {"chatml": "hermes", "llama3": "llama3_json", "mistral": "mistral", "": "qwen3_coder"}[name]
    calls = [("f", ARGUMENTS), ("g.h", {}), ("f", {"text": "x"})]
    text = written_by(template, calls, tiny_engine.tokenizer).removesuffix(end)
    options = {"marked": True, "style": STYLES[style], "types": {"f": SCHEMA}}
    for pieces in ([text], [*text, ""], *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        assert read(pieces, **options) == ("", calls)
    for cut in range(1, len(text), 5):  # an answer that ends early has calls, the last of which may be cut, and text
        content, found = read([text[:cut]], **options)
        assert found[:-1] == calls[: len(found[:-1])]
        assert all(
            begins(value, calls[len(found) - 1][1][key]) for _, last in found[-1:] for key, value in last.items()
        )
        assert (content, found) == read([*text[:cut], ""], **options)
        assert content in text


@pytest.mark.parametrize(
    ("style", "text", "content", "called"),
    [
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        ("llama3_json", '\n<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}', "", [("f", {}), ("g", {})]),
        ("llama3_json", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
        ("llama3_json", 'So: {"name": "f"}', 'So: {"name": "f"}', []),
        ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (
            "mistral",
            'Yes.[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g{}',
            "Yes.",
            [("f", {"a": "]"}), ("g", {})],
        ),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", [("f", {"a": 1})]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": "x"}]',
            '[TOOL_CALLS] [{"name": "f", "arguments": "x"}]',
            [],
        ),
        ("mistral", "[TOOL_CALLS]no name at all {", "[TOOL_CALLS]no name at all {", []),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>", "", [("f", {"a": 1})]),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
        ("qwen3_coder", "<function=\n<function=f></function>", "<function=\n", [("f", {})]),
        ("qwen3_coder", "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
        ("qwen3_coder", "<tool_call><function=f></function>\nand", "and", [("f", {})]),
    ],
)
def test_styles_in_all_cuts(style: str, text: str, content: str, called: list[Any]) -> None:
    options = {"marked": True, "style": STYLES[style]}
    for pieces in ([text], [*text, ""], *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        assert read(pieces, **options) == (content, called)


@pytest.mark.parametrize("template", ["", "no tools", "<tool_call>{{ x }}<arg_key>", None])
def test_a_template_without_a_known_style(template: str | None) -> None:
    assert style_of(template) is None


@pytest.mark.parametrize(
    ("thinking", "text", "thought", "content"),
    [
        ("open", "\nso <b> it\n</think>\n\nYes. </think>", "so <b> it", "Yes. </think>"),
        ("open", "no end </thi", "no end </thi", ""),
        ("may", "\n<think>\na\n</think>\nb", "a", "b"),
        ("may", "<think></think>b", "", "b"),
        ("may", " <thin", "", " <thin"),
        ("may", "b <think>", "", "b <think>"),
        (None, "<think>a</think>", "", "<think>a</think>"),
    ],
)
def test_thinking_is_no_content(thinking: Any, text: str, thought: str, content: str) -> None:
    for pieces in ([text], [*text, ""], *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        reader, found = MessageReader(thinking, CallReader()), {"reasoning_content": "", "content": ""}
        for number, piece in enumerate(pieces):
            for delta in reader.read(piece, number == len(pieces) - 1):
                for key, value in delta.items():
                    found[key] += value
        assert found == {"reasoning_content": thought, "content": content}


def test_a_required_call_begins_behind_the_thinking() -> None:
    reader = MessageReader("open", CallReader("f"))
    assert reader.read("so", False) == [{"reasoning_content": "so"}]
    assert reader.read("</think>\n", False) == []
    (delta,) = reader.read('{"a":1}', False)
    assert delta["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert MessageReader("open", CallReader("f")).read("so", True) == [{"reasoning_content": "so"}]
