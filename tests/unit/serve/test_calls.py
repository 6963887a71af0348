"""Calls that a model marks in its text are the same however the text comes in pieces."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest

from specdec import Engine
from specdec.serve import call_styles
from specdec.serve.calls import CallReader, MessageReader
from specdec.serve.styles import STYLES, style_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
OTHER = '<tool_call>{"name": "now", "parameters": {}}</tool_call>'


def written(arguments: Any) -> str:
    """A call of ``f`` in marks."""
    return f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"


def read(pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and names and arguments of the calls in their order."""
    reader, content, calls = CallReader(**options), "", dict[int, list[str]]()
    for number, piece in enumerate(pieces):
        for delta in reader.read(piece, number == len(pieces) - 1):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                name_and_arguments = calls.setdefault(call["index"], ["", ""])
                name_and_arguments[0] += call["function"].get("name", "")
                name_and_arguments[1] += call["function"].get("arguments", "")
    assert reader.count == len(calls)
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


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


def test_each_character_of_a_call_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[int]()
    end = call_styles._Marked.end

    def counted(own: Any, held: str, last: bool) -> Any:
        before = own._at
        found = end(own, held, last)
        looked.append(own._at - before)
        return found

    monkeypatch.setattr(call_styles._Marked, "end", counted)
    text = written({"text": "x" * 20_000})
    assert read([*text, ""], marked=True)[1] == [("f", {"text": "x" * 20_000})]
    assert sum(looked) <= len(text)
    assert max(looked) < 40


def test_text_is_text_where_no_calls_are_looked_for() -> None:
    assert read([CALL[:9], CALL[9:]]) == (CALL, [])


def test_a_forced_call_s_text_is_its_arguments() -> None:
    text = '{"a": 1}'
    for first, last in pairwise([0, 3, len(text)]):
        assert read([text[:last], text[last:]], forced="add") == ("", [("add", {"a": 1})]), first


def test_a_call_whose_name_is_chosen_is_read_as_a_whole() -> None:
    text = '{"name": "add", "arguments": {"a": 1}}'
    assert read([text[:7], text[7:]], forced="") == ("", [("add", {"a": 1})])
    assert read([text[:7], ""], forced="") == (text[:7], [])  # cut before its end


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
    for cut in range(1, len(text)):  # an answer that ends early has calls, each of them whole, and text
        content, found = read([text[:cut]], **options)
        assert found == calls[: len(found)]
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
    (delta,) = reader.read('{"a":', False)
    assert delta["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":'}
    assert MessageReader("open", CallReader("f")).read("so", True) == [{"reasoning_content": "so"}]
