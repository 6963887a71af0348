"""Calls that a model marks in its text are the same however the text comes in pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from specdec.serve.calls import CallReader

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
OTHER = '<tool_call>{"name": "now", "parameters": {}}</tool_call>'


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
    return content.strip(), [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [("add", {"a": 1, "b": [2, 3]})]),
        (f"Let me see.\n{CALL}\n{OTHER}", "Let me see.", [("add", {"a": 1, "b": [2, 3]}), ("now", {})]),
        ("no call at all, 1 < 2", "no call at all, 1 < 2", []),
        ("<tool_call>not JSON</tool_call> and more", "<tool_call>not JSON</tool_call> and more", []),
        ('cut <tool_call>{"name": "ad', 'cut <tool_call>{"name": "ad', []),
        ("ends as a mark begins <tool_", "ends as a mark begins <tool_", []),
    ],
)
def test_marked_calls_do_not_depend_on_the_pieces(text: str, content: str, calls: list[Any]) -> None:
    assert read([text], marked=True) == (content, calls)
    assert read([*text, ""], marked=True) == (content, calls)
    for cut in range(1, len(text)):
        assert read([text[:cut], text[cut:]], marked=True) == (content, calls)


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
