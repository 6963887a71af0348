"""Calls that a model marks in its text are the same however the text comes in pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from specdec.serve import calls
from specdec.serve.calls import CallReader

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
    end = calls._Marked.end

    def counted(own: Any, held: str, last: bool) -> Any:
        before = own._at
        found = end(own, held, last)
        looked.append(own._at - before)
        return found

    monkeypatch.setattr(calls._Marked, "end", counted)
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
