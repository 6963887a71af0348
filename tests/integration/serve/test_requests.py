"""What clients send that OpenAI's own do not: their fields, numbers and headers, and what may hold up nobody."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from specdec import Engine
from specdec.serve import connections, endpoints, reply
from specdec.serve.json_grammar import Grammars
from specdec.serve.text_bounds import bytes_of_a_token
from tests.integration.serve.test_faults import CHAT, COMPLETIONS, CONTEXT, HELLO, WAIT, Gate
from tests.serving import SECONDS, Running, serving


@pytest.fixture
def gate(tiny_engine: Engine) -> Iterator[Gate]:
    made = Gate(tiny_engine.tokenizer)
    yield made
    made.opened.set()


@pytest.fixture(scope="module")
def steady(tiny_engine: Engine) -> Iterator[Running]:
    with serving(Gate(tiny_engine.tokenizer).engine, max_num_seqs=3, max_queue=5) as running:
        yield running


TALK: Any = [{"role": "user", "content": "a"}, {"role": "assistant"}, {"role": "user", "content": "b"}]
SAID: Any = {"messages": HELLO, "max_tokens": 2}

# Requests that are answered.
TAKEN: list[tuple[str, Any]] = [
    *((CHAT, {**SAID, name: None}) for name in ("mm_processor_kwargs", "reasoning", "cache_salt", "bad_words", "new")),
    *((CHAT, {**SAID, name: []}) for name in ("functions", "tools", "stop", "logit_bias", "bad_words", "new")),
    *((CHAT, {**SAID, name: {}}) for name in ("web_search_options", "response_format", "prediction", "new")),
    *((CHAT, {**SAID, "reasoning_effort": effort}) for effort in ("none", "minimal", "low", "high")),
    *((CHAT, {**SAID, name: None}) for name in ("stream", "n", "stop", "tools", "tool_choice", "speculation")),
    (CHAT, {**SAID, "speculation": {"trace": None, "per_step": None}}),
    (CHAT, {**SAID, "response_format": {"type": "text", "json_schema": None, "strict": None}}),
    (CHAT, {**SAID, "reasoning": {"effort": "low", "exclude": True}}),
    (CHAT, {**SAID, "thinking": {"type": "disabled"}, "think": False, "enable_thinking": False}),
    (CHAT, {**SAID, "usage": {"include": True}, "provider": {"order": ["x"]}}),
    (CHAT, {**SAID, "messages": TALK}),
    (CHAT, {**SAID, "messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": []}, TALK[2]]}),
    (CHAT, {**SAID, "messages": [TALK[0], {"role": "assistant", "content": None, "refusal": None}, TALK[2]]}),
    (CHAT, {"messages": HELLO, "max_tokens": -1}),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 2.0, "n": 2.0, "top_k": 40.0, "seed": 1.0}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stop": ""}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stop": ["", "never"]}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "suffix": "", "best_of": 1.0}),
    (COMPLETIONS, {"prompt": "x", "n_predict": 2, "repeat_penalty": 1.1, "typical_p": 1, "cache_prompt": True}),
    (COMPLETIONS, {"prompt": "x", "max_new_tokens": 2, "mirostat": 0, "mirostat_tau": 5, "tfs_z": 1.0, "top_a": 0}),
    (COMPLETIONS, {"prompt": "x", "num_predict": 2, "repeat_last_n": 64, "num_ctx": 4096, "keep_alive": "5m"}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "temperature": 1e-320}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "min_tokens": 1, "stop_token_ids": list(range(4095))}),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("path", "body"), TAKEN)
def test_what_asks_for_nothing_or_for_ours_is_answered(steady: Running, path: str, body: Any) -> None:
    with steady.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"]


# Path, body, the field that is named, words of the message.
REFUSED: list[tuple[str, Any, str | None, str]] = [
    (CHAT, {**SAID, "typical_p": 0.5}, "typical_p", "0.5.*leave the field out, or send 1"),
    (CHAT, {**SAID, "repeat_last_n": 64, "repeat_penalty": 1.2}, "repeat_last_n", "or send -1"),
    (CHAT, {**SAID, "reasoning_effort": "much"}, "reasoning_effort", "'much'.*none, minimal, low"),
    (CHAT, {**SAID, "max_tokens": -2}, "max_tokens", "-2.*-1"),
    (CHAT, {**SAID, "max_tokens": 16.5}, "max_tokens", "16.5"),
    (CHAT, {**SAID, "stop": "x" * 1025}, "stop.0", "1025 characters.*1024"),
    (CHAT, {**SAID, "stop": ["x"] * 65}, "stop", "65 items.*64"),
    (CHAT, {**SAID, "logit_bias": {str(place): 1 for place in range(1025)}}, "logit_bias", "1025 items.*1024"),
    (CHAT, {**SAID, "logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    (CHAT, {**SAID, "repetition_penalty": 1e-300}, "repetition_penalty", "1e-300.*0.01"),
    (CHAT, {**SAID, "messages": [{"role": "user", "content": ["x"] * 20_000}]}, "messages.0.content", "20000 items"),
    (CHAT, {**SAID, "prediction": {"type": "content", "content": "a b " * 99}}, "prediction.content", "leaves .* to"),
    (
        COMPLETIONS,
        {"prompt": "x", "min_tokens": 2, "stop_token_ids": list(range(4096))},
        "stop_token_ids",
        "every token",
    ),
    (COMPLETIONS, {"prompt": [[5]] * 9}, "n", "wants 9 answers.*takes 8"),
    (COMPLETIONS, {"prompt": [[5]] * 3, "n": 3}, "n", "wants 9 answers"),
    (CHAT, {**SAID, "n": 9}, "n", "wants 9 answers"),
    (
        CHAT,
        {
            "messages": [TALK[0], {"role": "assistant", "content": "I", "tool_calls": [{"function": {"name": "f"}}]}],
            "continue_final_message": True,
        },
        "continue_final_message",
        "has tool_calls",
    ),
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("path", "body", "param", "words"), REFUSED)
def test_a_remedy_is_told(steady: Running, path: str, body: Any, param: str | None, words: str) -> None:
    with steady.http() as http:
        answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert re.search(words, error["message"]), error["message"]


def test_other_servers_names_mean_ours(running: Running) -> None:
    with running.http() as http:

        def text(**fields: Any) -> Any:
            return http.post(COMPLETIONS, json={"prompt": "x = 1\n" * 5, "temperature": 0, **fields}).json()["choices"]

        assert text(n_predict=9, repeat_penalty=1.4) == text(max_tokens=9, repetition_penalty=1.4) != text(max_tokens=9)
        assert text(max_tokens=9, temperature=1, do_sample=False) == text(max_tokens=9)
        assert text(max_tokens=9, stopping_strings=["="]) == text(max_tokens=9, stop="=")


def test_effort_and_thinking_reach_the_template(steady: Running) -> None:
    with steady.http() as http:
        lane = steady.service.lanes[0]
        tokenizer = lane.encoder._tokenizer
        before = tokenizer.chat_template
        tokenizer.chat_template = "{{ reasoning_effort }} {{ enable_thinking }}"
        try:
            for fields, words in (
                ({"reasoning_effort": "low"}, "low "),
                ({"reasoning_effort": "none"}, "none False"),
                ({"reasoning": {"effort": "high", "enabled": True}}, "high True"),
                ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, " False"),
                ({"thinking": {"type": "enabled"}}, " True"),
            ):
                used = http.post(CHAT, json={**SAID, **fields}).json()["usage"]["prompt_tokens"]
                assert used == len(tokenizer(words, add_special_tokens=False)["input_ids"]), fields
        finally:
            tokenizer.chat_template = before


def test_no_token_is_an_empty_answer(steady: Running) -> None:
    with steady.http() as http:
        answer = http.post(COMPLETIONS, json={"prompt": ["x", "y"], "max_tokens": 0}).json()
        assert [(one["text"], one["finish_reason"]) for one in answer["choices"]] == [("", "length")] * 2
        assert answer["usage"]["completion_tokens"] == 0
        for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
            stream = http.post(path, json={**asked, "max_tokens": 0, "stream": True}).text
            assert stream.count('"finish_reason":"length"') == 1
            assert stream.endswith("data: [DONE]\n\n")


def test_unknown_fields_may_be_ignored(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with serving(gate.engine, unknown_fields="ignore") as running, running.http() as http:
        body = {"prompt": [7], "max_tokens": 2, "typical_p": 0.5, "surprise": 1, "stream_options": {"more": 2}}
        with caplog.at_level(logging.INFO, "specdec.serve"):
            assert http.post(COMPLETIONS, json=body).status_code == 200
            running.settle()
        assert "ignored 'more', 'surprise', 'typical_p'" in caplog.text
        assert http.post(COMPLETIONS, json={"prompt": [7], "best_of": 2}).status_code == 400, "it would be missed"
        assert http.post(COMPLETIONS, json={"prompt": [7], "temperature": "hot"}).status_code == 400


def test_tokenize_has_the_fields_of_other_servers(running: Running) -> None:
    with running.http() as http:

        def tokens(**body: Any) -> Any:
            answer = http.post("/tokenize", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        plain = tokens(prompt="def add", add_special_tokens=True, return_token_strs=True)
        assert len(plain["token_strs"]) == plain["count"] == len(plain["tokens"])
        assert tokens(content="def add", parse_special=True)["tokens"] == plain["tokens"][1:], "llama-server's default"
        assert tokens(content="def add", add_special=True)["tokens"] == plain["tokens"]
        assert tokens(prompt="def add", add_special_tokens=False)["tokens"] == plain["tokens"][1:]
        pieces = tokens(content="def add", with_pieces=True)["tokens"]
        assert "".join(one["piece"] for one in pieces) == "def add"
        messages = [{"role": "user", "content": "a"}]
        more: dict[str, Any] = {"messages": messages, "chat_template_kwargs": {}, "add_generation_prompt": False}
        assert tokens(**more)["count"] == tokens(messages=messages)["count"], "this template begins no answer"
        answer = http.post("/detokenize", json={"tokens": plain["tokens"][1:]}).json()
        assert answer["content"] == answer["prompt"] == "def add"


def test_a_model_has_several_names_and_a_length(gate: Gate) -> None:
    with serving(gate.engine, served_model_name=["one", "two"], max_model_len=32) as running, running.http() as http:
        models = http.get("/v1/models").json()["data"]
        assert [(one["id"], one["max_model_len"]) for one in models] == [("one", 32), ("two", 32)]
        assert http.get("/v1/models/two").json()["id"] == "two"
        answer = http.post(COMPLETIONS, json={"prompt": [5] * 20, "model": "two", "max_tokens": 50}).json()
        assert (answer["model"], answer["usage"]["total_tokens"]) == ("one", 32)
        told = http.post(COMPLETIONS, json={"prompt": [5] * 32}).json()["error"]["message"]
        assert re.search("32 tokens.*at most 31", told)
        assert "'one', 'two'" in http.post(COMPLETIONS, json={"prompt": [5], "model": "x"}).json()["error"]["message"]


def test_a_salt_shares_beginnings_with_its_own(running: Running) -> None:
    with running.http() as http:

        def cached(**salt: str) -> int:
            answer = http.post(COMPLETIONS, json={"prompt": "salted beginnings " * 9, "max_tokens": 1, **salt}).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached() <= 1 < cached(), "the first token begins all texts"
        assert cached(cache_salt="a") == 0 < cached(cache_salt="a")
        assert cached(cache_salt="b") == 0


# Headers, connections and the end.


def raw(running: Running, sent: bytes) -> bytes:
    """What a connection gets until it is closed."""
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), SECONDS) as client:
        client.sendall(sent)
        found = b""
        while piece := client.recv(4096):
            found += piece
    return found


def test_headers_that_clients_and_probes_send(gate: Gate) -> None:
    with serving(gate.engine, root_path="/llm") as running, running.http() as http:
        assert b" 200 " in raw(running, b"GET /health HTTP/1.0\r\n\r\n").splitlines()[0]
        assert b" 403 " in raw(running, b"GET /v1/models HTTP/1.0\r\n\r\n").splitlines()[0]
        zipped = http.post(COMPLETIONS, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
        assert (zipped.status_code, zipped.json()["error"]["code"]) == (415, "unsupported_encoding")
        assert http.get("/llm/v1/models").json() == http.get("/v1/models").json()
        assert http.get("/llm/health/").status_code == http.get("/llm").status_code == 200
        assert http.get("/llmx/health").status_code == 404
        told = http.get("/v1/models", headers={"Origin": "null"}).json()["error"]["message"]
        assert "--allow-origin 'null'" in told
    with serving(gate.engine, allow_origin=["null"]) as running, running.http() as http:
        assert http.get("/v1/models", headers={"Origin": "null"}).status_code == 200, "the remedy works"


def test_a_key_guards_paths_behind_a_root(gate: Gate) -> None:
    with serving(gate.engine, api_key="sesame", root_path="/llm") as running, running.http() as http:
        assert http.get("/llm/health").status_code == 200
        for path in ("/llm/v1/models", "/llm/metrics", "/llm/health/../metrics", "/llm//metrics"):
            assert http.get(path).status_code in (401, 404), path


def test_one_of_several_keys(gate: Gate, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("sesame\n\n  thyme \n")
    with serving(gate.engine, api_key_file=str(tmp_path / "keys")) as running, running.http() as http:
        for key, status in (("sesame", 200), ("thyme", 200), ("sesamethyme", 401)):
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status


def test_every_answer_and_log_line_has_the_request_s_id(steady: Running, caplog: pytest.LogCaptureFixture) -> None:
    with steady.http() as http, caplog.at_level(logging.INFO, "specdec.serve"):
        assert http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
        answers = [http.post(COMPLETIONS, json=body) for body in ({"prompt": [7]}, {"prompt": 7}, {"prompt": 7})]
        names = [answer.headers["x-request-id"] for answer in answers]
        assert len(set(names)) == 3
        steady.settle()
        assert all(name in caplog.text for name in names)
        assert http.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req-")


def test_headers_that_do_not_arrive_close_the_connection(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.05)
    with serving(gate.engine) as running:
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for begun in (b"", b"GET /health HT", whole + b"GET /he"):
            answer = raw(running, begun)  # ends, as the server closes it
            assert answer.startswith(b"HTTP/1.1 200") == begun.startswith(whole)
        with running.http() as http:
            assert http.post(COMPLETIONS, json={"prompt": [7]}).status_code == 200, "which takes longer than headers"


def test_descriptors_do_not_run_out(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections.Connection, "_most", 2)
    monkeypatch.setattr(connections.Connection, "_told", 0.0)
    with serving(gate.engine) as running, caplog.at_level(logging.WARNING):
        host, port = running.url.removeprefix("http://").split(":")
        held = [socket.create_connection((host, int(port)), SECONDS) for _ in range(2)]
        while len(running.server.server_state.connections) < 2:
            pass
        for _ in range(5):
            with socket.create_connection((host, int(port)), SECONDS) as one, suppress(ConnectionResetError):
                assert one.recv(1) == b"", "it was not closed"
        for one in held:
            one.close()
        while running.server.server_state.connections:
            pass
        with running.http() as http:
            assert http.get("/health").status_code == 200
    assert caplog.text.count("as many as the limit of open files allows") == 1


def test_a_stream_that_waits_begins_with_a_comment(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "_SILENCE", (0.01, 0.01))
    with serving(gate.engine, max_num_seqs=1, max_queue=0) as running, running.http() as http:
        body = {"prompt": [WAIT, 7], "max_tokens": 3, "temperature": 0, "stream": True}
        with http.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)] == [": waiting", ""] * 2
            assert http.post(COMPLETIONS, json=body).status_code == 429
            assert http.post(COMPLETIONS, json={**body, "n": 0}).status_code == 400
            gate.opened.set()
            said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(one["choices"][0]["text"] for one in said) == gate.text([WAIT, 7], 3)


def test_health_is_503_while_the_server_ends(gate: Gate) -> None:
    with serving(gate.engine) as running, running.http() as http:
        assert http.get("/health").status_code == 200
        texts: list[httpx2.Response] = []

        def ask() -> None:
            with running.http() as other:
                texts.append(other.post(COMPLETIONS, json={"prompt": [WAIT, 7], "max_tokens": 3, "temperature": 0}))

        client = Thread(target=ask)
        client.start()
        assert gate.waits.wait(SECONDS)
        running.server.handle_exit(signal.SIGTERM, None)
        with running.http() as new:
            for _ in range(3):
                assert [one.get("/health").status_code for one in (http, new)] == [503, 503]
            assert new.post(COMPLETIONS, json={"prompt": [7]}).status_code == 503
        gate.opened.set()
        client.join(SECONDS)
        assert texts[0].json()["choices"][0]["text"] == gate.text([WAIT, 7], 3)
        running.thread.join(SECONDS)
        assert not running.thread.is_alive()


# What holds up nobody.


def test_what_cannot_fit_is_not_tokenized_and_nothing_is_on_the_loop(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is counted: which texts are tokenized, predictions indexed and schemas compiled, and by which thread."""
    seen: list[tuple[str, int]] = []

    def counted(owner: Any, name: str, size: Any) -> None:
        inner = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            seen.append((threading.current_thread().name, size(*arguments)))
            return inner(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    counted(PreTrainedTokenizerFast, "_encode_plus", lambda own, text=None, *_: len(text or ""))
    counted(endpoints, "appeared", lambda predicted, text: len(predicted))
    counted(Grammars, "of", lambda own, schema, *_: len(json.dumps(schema)))
    token = bytes_of_a_token(tiny_engine.tokenizer)
    assert token is not None
    most = token.most
    long = "!" * 1_000_000
    talk = [{"role": "user", "content": long}]
    prediction = {"type": "content", "content": long}
    schema: Any = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {}}}}
    with serving(Gate(tiny_engine.tokenizer).engine, max_num_seqs=2, max_queue=2) as running, running.http() as http:
        seen.clear()
        for path, body, status in (
            (COMPLETIONS, {"prompt": long}, 400),
            (COMPLETIONS, {"prompt": ["a"] * 200, "n": 9}, 400),
            (COMPLETIONS, {"prompt": [[5]] * 200}, 400),
            (COMPLETIONS, {"prompt": [5] * 100_000}, 400),
            (CHAT, {"messages": talk}, 400),
            (CHAT, {"messages": HELLO, "n": 5}, 400),
            (CHAT, {"messages": HELLO, "prediction": prediction}, 400),
            (CHAT, {"messages": HELLO, "stop": long}, 400),
            (CHAT, {"messages": HELLO, "stop": [long]}, 400),
            ("/tokenize", {"prompt": long}, 400),
            ("/tokenize", {"messages": talk}, 400),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == status, (path, answer.text)
            assert len(answer.text) < 2_000
        assert len(seen) <= 3, "only HELLO is tokenized"
        assert all(size <= 100 for _, size in seen)
        for body in (
            {"messages": HELLO, "prediction": {"type": "content", "content": "hello"}, "max_tokens": 2},
            {"messages": HELLO, "stop": ["x"], "max_tokens": 2, "stream": True},
            {"messages": HELLO, "response_format": schema, "max_tokens": 2},
            {"messages": [{"role": "user", "content": " " * CONTEXT * most}], "max_tokens": 2},
        ):
            http.post(CHAT, json=body)
    assert len(seen) > 5
    assert {name.rpartition("_")[0] for name, _ in seen} <= {"specdec-plan", "specdec-plan-large"}, seen
    assert max(size for _, size in seen) <= 2 * CONTEXT * most


def test_a_large_body_holds_up_no_small_one(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    with serving(gate.engine) as running, running.http() as http:
        small, large = running.service.lanes
        assert running.service.lane(b"x" * 1000) is small
        assert running.service.lane(b"x" * 1_000_000) is large
        busy = running.call(_later(large, lambda lane: held.wait(SECONDS)))
        try:
            assert http.post(COMPLETIONS, json={"prompt": [7], "max_tokens": 1}).status_code == 200
        finally:
            held.set()
        assert running.call(_result(busy))


async def _later(lane: Any, work: Any) -> Any:
    import asyncio

    return asyncio.ensure_future(lane.call(work))


async def _result(task: Any) -> Any:
    return await task
