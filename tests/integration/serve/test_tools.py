"""Tools, thinking and forms over HTTP, on a model without weights whose answers the test gives."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from specdec import Engine
from specdec.costs.curve import CostCurve
from specdec.errors import ConfigError
from specdec.models.chat_templates import chat_template_names, with_chat_template
from specdec.serve.styles import STYLES
from tests.fakes import Reciter
from tests.serving import Running, serving

BEGIN = "<|answer|>"
TEMPLATE = "{{ '<think></think>' if false }}{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
OPEN = "{% if open_thinking %}<think>\n{% endif %}"
ADDED = (BEGIN, "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|eot|>")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}
CITY = {"type": "object", "properties": {"c": {"enum": ["Paris"]}}, "required": ["c"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}


class Speaker:
    """An engine whose answers a test sets; special tokens are written in them as texts."""

    def __init__(self, engine: Engine) -> None:
        self.tokenizer = copy.deepcopy(engine.tokenizer)
        special = [AddedToken(text, special="think" not in text, normalized=False) for text in ADDED]
        self.tokenizer.add_tokens(special)
        self.tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}" + BEGIN + OPEN + "{% endif %}"
        self.end = self.tokenizer.convert_tokens_to_ids("<|eot|>")
        self.begin = self.tokenizer.convert_tokens_to_ids(BEGIN)
        self.script = list[int]()
        target = Reciter(self.rule, vocab_size=len(self.tokenizer), context_length=3000, eos_ids=[self.end])
        costs = CostCurve(machine={}, rows=[1, 64], lengths=[1], seconds=[[1e-3, 2e-3]])
        self.engine = Engine(target, self.tokenizer, "prompt_lookup", max_rows=8, costs=costs)

    def says(self, text: str) -> None:
        self.script = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end]

    def rule(self, text: list[int]) -> int:
        said = text[::-1].index(self.begin) - (self.opened(text) if self.begin in text else 0)
        return self.script[min(said, len(self.script) - 1)]

    def opened(self, text: list[int]) -> int:
        """Tokens that the template writes behind the mark."""
        place = len(text) - text[::-1].index(self.begin)
        opening = self.tokenizer("<think>\n", add_special_tokens=False)["input_ids"]
        return len(opening) if text[place : place + len(opening)] == opening and self.skips else 0

    skips = False


@pytest.fixture(scope="module")
def speaker(tiny_engine: Engine) -> Speaker:
    return Speaker(tiny_engine)


@pytest.fixture(scope="module")
def spoken(speaker: Speaker) -> Iterator[Running]:
    with serving(speaker.engine, max_num_seqs=4) as server:
        yield server


def message(running: Running, **body: Any) -> tuple[dict[str, Any], str]:
    """The message and its finish reason, after checking that a stream's pieces add up to the same."""
    with running.http() as http:
        body = {"messages": [{"role": "user", "content": "Look."}], "temperature": 0, "max_tokens": 200, **body}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        events = http.post("/v1/chat/completions", json={**body, "stream": True}).text.split("data: ")[1:-1]
    (choice,) = answer.json()["choices"]
    whole, added = choice["message"], {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for event in events:
        for piece in json.loads(event)["choices"]:
            delta = piece["delta"]
            for key in added:
                added[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert added == {key: whole.get(key) or "" for key in added}
    assert calls == [call["function"] for call in whole.get("tool_calls", ())]
    return whole, choice["finish_reason"]


@pytest.mark.slow
def test_calls_on_a_template_without_a_place_for_tools(spoken: Running, speaker: Speaker) -> None:
    speaker.says('Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "here"}}\n</tool_call>')
    found, reason = message(spoken, tools=[TOOL])
    assert (found["content"], reason) == ("Let me see.\n", "tool_calls")
    (call,) = found["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": "here"}'}
    for without in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        assert "<tool_call>" in message(spoken, **without)[0]["content"]


def test_a_call_that_breaks_off_is_an_object_and_its_finish_reason_says_so(spoken: Running, speaker: Speaker) -> None:
    speaker.says('<tool_call>{"name": "look", "arguments": {"at": "here or there", "b": NaN}}</tool_call>')
    found, reason = message(spoken, tools=[TOOL])
    assert found["tool_calls"][0]["function"]["arguments"] == '{"at": "here or there"}'
    assert (found["content"], reason) == ("NaN}}</tool_call>", "stop")
    whole = len(speaker.script)
    for most in (whole // 2, 3 * whole // 4, whole - 12):
        found, reason = message(spoken, tools=[TOOL], max_tokens=most)
        assert reason == "length"
        for call in found.get("tool_calls", ()):
            assert "here or there".startswith(json.loads(call["function"]["arguments"])["at"])


def test_tools_and_history_are_written_as_text(spoken: Running) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "a tree"},
        {"role": "tool", "tool_call_id": "b", "content": "a sea"},
    ]
    with spoken.http() as http:
        texts = []
        for tools in ([TOOL], []):
            tokens = http.post("/tokenize", json={"messages": talk, "tools": tools}).json()["tokens"]
            texts.append(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])
    for text in texts:
        assert '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>\n' in text
        assert "user:<tool_response>\na tree\n</tool_response>\n<tool_response>\na sea\n</tool_response>\n" in text
        assert text.count("tool:") == 0
    assert texts[0].startswith("system:Be brief.\n\nYou can call")
    assert '{"type": "function", "function": {"name": "look"' in texts[0]
    assert texts[1].startswith("system:Be brief.\nuser:")


def test_tools_where_a_template_refuses_system_messages(spoken: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = spoken.service.lanes[0].encoder
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    monkeypatch.setattr(encoder._tokenizer, "chat_template", template)
    with spoken.http() as http:
        body = {"messages": [{"role": "user", "content": "Look."}], "tools": [TOOL]}
        tokens = http.post("/tokenize", json=body).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.startswith("user:You can call")
    assert text.rstrip().endswith("\n\nLook.")


def test_marks_that_are_special_tokens(spoken: Running, speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoken.service, "speaker", replace(spoken.service.speaker, style=STYLES["mistral"]))
    speaker.says('Yes.[TOOL_CALLS]look[ARGS]{"at": "END"}')
    found, reason = message(spoken, tools=[TOOL])
    assert (found["content"], reason) == ("Yes.", "tool_calls")
    assert found["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "END"}'}
    assert len(found["tool_calls"][0]["id"]) == 9
    found, reason = message(spoken, tools=[TOOL], stop="END")  # with special tokens or without, a stop string is one
    assert (found["content"], reason) == ('Yes.[TOOL_CALLS]look[ARGS]{"at": "', "stop")
    assert message(spoken)[0]["content"] == 'Yes.look{"at": "END"}'


@pytest.mark.few(1)
@pytest.mark.parametrize("opened", [False, True])
def test_thinking_is_told_apart(
    spoken: Running, speaker: Speaker, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    monkeypatch.setattr(speaker, "skips", opened)
    speaker.says(f"{'' if opened else '<think>'}so{{}} it\n</think>\n\nYes.")
    more = {"chat_template_kwargs": {"open_thinking": opened}}
    found, reason = message(spoken, **more)
    assert (found["reasoning_content"], found["content"], reason) == ("so{} it", "Yes.", "stop")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_form_begins_behind_the_thinking(
    spoken: Running, speaker: Speaker, monkeypatch: pytest.MonkeyPatch, opened: bool, drafter: str
) -> None:
    monkeypatch.setattr(speaker, "skips", opened)
    speaker.says(f'{"" if opened else "<think>"}a {{"c": b\n</think>\n\n{{"c":"Paris"}} and more')
    more = {"chat_template_kwargs": {"open_thinking": opened}, "speculation": {"drafter": drafter}}
    found, reason = message(spoken, response_format=FORM, **more)
    assert (found["reasoning_content"], found["content"], reason) == ('a {"c": b', '{"c":"Paris"}', "stop")
    required = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}
    speaker.says(f'{"" if opened else "<think>"}so</think>\n{{"at":1}}')
    found, _ = message(spoken, **required, **more)
    assert found["reasoning_content"] == "so"
    assert found["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at":1}'}


def test_an_answer_without_thinking_may_have_its_form_at_once(spoken: Running, speaker: Speaker) -> None:
    speaker.says('{"c":"Paris"}')
    found, _ = message(spoken, response_format=FORM)
    assert found == {"role": "assistant", "content": '{"c":"Paris"}'}


@pytest.mark.slow
def test_another_chat_template(tiny_engine: Engine, tmp_path: Path) -> None:
    assert chat_template_names() == ["chatml", "llama3", "mistral"]
    before = tiny_engine.tokenizer.chat_template
    talk = [{"role": "user", "content": "Hi"}]
    other = with_chat_template(tiny_engine.tokenizer, "chatml")
    text = other.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    assert with_chat_template(tiny_engine.tokenizer, file).apply_chat_template(talk, tokenize=False) == "Hi!"
    assert tiny_engine.tokenizer.chat_template == before
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"own\.ji.*, which is no template: .*; mend its line 1"):
        with_chat_template(tiny_engine.tokenizer, file)
    with pytest.raises(ConfigError, match=r"chat_template is 'chatmal', .*; give a file, or one of chatml, llama3"):
        with_chat_template(tiny_engine.tokenizer, "chatmal")
    loaded = Engine.from_pretrained("tiny", chat_template="chatml")
    assert loaded.tokenizer.chat_template == other.chat_template
