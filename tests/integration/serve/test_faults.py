"""What goes wrong: requests that are no good, clients that vanish, models that raise, full queues, and the end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import httpx2
import openai
import pytest

from specdec import Engine
from specdec.engine.scheduler import Scheduler
from specdec.errors import CacheError
from tests.fakes import Reciter
from tests.serving import SECONDS, Running, serving

CONTEXT = 64
WAIT, RAISE, FULL = 100, 101, 102  # tokens of prompts: the model waits for the gate, raises, or lacks memory
SECRET = "a9f3secret"


class Gate:
    """A model without weights that counts, raises where the text says so, or waits until it is opened."""

    def __init__(self, tokenizer: Any) -> None:
        self.opened, self.waits = Event(), Event()
        self.target = Reciter(self.rule, vocab_size=4096, context_length=CONTEXT)
        self.engine = Engine(self.target, tokenizer, "none")

    def rule(self, text: list[int]) -> int:
        if FULL in text:
            raise CacheError("no page is left: lower max_new_tokens")
        if RAISE in text:
            raise RuntimeError(f"the model broke {SECRET}")
        if WAIT in text:
            self.waits.set()
            assert self.opened.wait(SECONDS)
        return 300 + (sum(text) + len(text)) % 500

    def text(self, prompt: list[int], count: int) -> str:
        """What it says after a prompt, by the engine itself."""
        return self.engine.generate(prompt, count).text


@pytest.fixture
def gate(tiny_engine: Engine) -> Iterator[Gate]:
    made = Gate(tiny_engine.tokenizer)
    yield made
    made.opened.set()


@pytest.fixture(scope="module")
def steady(tiny_engine: Engine) -> Iterator[Running]:
    """A server whose model never waits."""
    with serving(Gate(tiny_engine.tokenizer).engine, max_num_seqs=3, max_body_bytes=20_000) as running:
        yield running


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
IMAGE: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]

# Path, body, status, the field that is named, words of the message.
MALFORMED: list[tuple[str, Any, int, str | None, str]] = [
    (CHAT, b"", 400, None, "no JSON"),
    (CHAT, b"{", 400, None, "no JSON"),
    (CHAT, b"[]", 400, None, "one JSON object"),
    (CHAT, b"null", 400, None, "one JSON object"),
    (CHAT, b"\xff\xfe", 400, None, "no JSON"),
    (CHAT, b'{"messages": "\\ud800"}', 400, None, "no JSON"),
    (CHAT, b'{"temperature": NaN}', 400, None, "no JSON"),
    (CHAT, b"[" * 5000, 400, None, "no JSON"),
    (CHAT, {}, 400, "messages", "missing"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": "hello"}, 400, "messages", "list"),
    (CHAT, {"messages": ["hello"]}, 400, "messages.0", "hello"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content", "no content"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role", "'king'"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages.0.role", "missing"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", "5"),
    (CHAT, {"messages": IMAGE}, 400, "messages.0.content.0", "'image_url'"),
    (CHAT, {"messages": HELLO, "model": "gpt-9"}, 404, "model", "'gpt-9'.*'tiny'"),
    (CHAT, {"messages": HELLO, "model": 5}, 400, "model", "5"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, 400, "temperature", "'hot'"),
    (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature", "-1"),
    (CHAT, {"messages": HELLO, "temperature": 3}, 400, "temperature", "2"),
    (CHAT, {"messages": HELLO, "top_p": 0}, 400, "top_p", "greater than 0"),
    (CHAT, {"messages": HELLO, "top_k": 1.5}, 400, "top_k", "1.5"),
    (CHAT, {"messages": HELLO, "min_p": 1}, 400, "min_p", "less than 1"),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "n", "0"),
    (CHAT, {"messages": HELLO, "n": 10**9}, 400, "n", "128"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": True}, 400, "max_completion_tokens", "True"),
    (CHAT, {"messages": HELLO, "seed": 2**70}, 400, "seed", str(2**70)),
    (CHAT, {"messages": HELLO, "stop_token_ids": [9999]}, 400, "stop_token_ids", "9999"),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias", "'x'"),
    (CHAT, {"messages": HELLO, "logit_bias": {"9999": 1}}, 400, "logit_bias", "'9999'"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 101}}, 400, "logit_bias.5", "101.*100"),
    (CHAT, {"messages": HELLO, "frequency_penalty": 9}, 400, "frequency_penalty", "9"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": 3}, 400, "logprobs", "3"),
    (CHAT, {"messages": HELLO, "temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
    (CHAT, {"messages": HELLO, "audio": {"voice": "x"}}, 400, "audio", "audio"),
    (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, 400, "modalities", "audio"),
    (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, 400, "functions", "'f'"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice", "no tools"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type", "'xml'"),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema"}},
        400,
        "response_format.json_schema",
        "schema",
    ),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "void"}}}},
        400,
        "response_format",
        "void",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "a b " * 99}]}, 400, "messages", f"{CONTEXT}"),
    (CHAT, {"messages": HELLO, "stream_options": {"include": 1}}, 400, "stream_options.include", "include"),
    (CHAT, {"messages": HELLO, "speculation": {"max_rows": 0}}, 400, "speculation.max_rows", "is 0"),
    (CHAT, {"messages": HELLO, "speculation": {"max_rows": 9999}}, 400, "speculation.max_rows", "9999.*128"),
    (CHAT, {"messages": HELLO, "speculation": {"drafter": "jacoby"}}, 400, "speculation.drafter", "'jacobi'"),
    (CHAT, {"messages": HELLO, "prediction": {"type": "image", "content": "x"}}, 400, "prediction.type", "image"),
    (CHAT, {"messages": HELLO, "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "9.*at most 8"),
    (CHAT, {"messages": HELLO, "chat_template": "x"}, 400, "chat_template", "'x'"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs", "'tools'"),
    (
        CHAT,
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
        "one of them",
    ),
    (COMPLETIONS, {"prompt": "x", "skip_special_tokens": False}, 400, "skip_special_tokens", "False.*send true"),
    (COMPLETIONS, {"prompt": "x", "include_stop_str_in_output": True}, 400, "include_stop_str_in_output", "send false"),
    (COMPLETIONS, {"prompt": "x", "add_special_tokens": False}, 400, "add_special_tokens", "send true"),
    (COMPLETIONS, {"prompt": "x", "guided_json": {}}, 400, "guided_json", "leave the field out"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 1}, 400, "truncate_prompt_tokens", "leave the field out"),
    ("/chat/completions", {"messages": HELLO}, 404, None, "call /v1/chat/completions"),
    ("/v1/v1/completions", {"prompt": "x"}, 404, None, "call /v1/completions"),
    ("/v1/models", {}, 405, None, "call it by GET"),
    (COMPLETIONS, {}, 400, "prompt", "missing"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ["", []]}, 400, "prompt.1", "prompt.1 is"),
    (COMPLETIONS, {"prompt": [[]]}, 400, None, "empty"),
    (COMPLETIONS, {"prompt": [5000]}, 400, None, "5000"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt.0", "prompt.0 is -1"),
    (COMPLETIONS, {"prompt": [1] * CONTEXT}, 400, "prompt", f"{CONTEXT} tokens.*at most {CONTEXT - 1}"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, 400, "best_of", "2"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix", "'y'"),
    (COMPLETIONS, {"prompt": "x", "best_of": 4}, 400, "best_of", "4"),
    (COMPLETIONS, {"prompt": "x" * 30_000}, 413, None, "20000"),
    ("/tokenize", {}, 400, "prompt", "one of them"),
    ("/detokenize", {"tokens": [5000]}, 400, "tokens", "5000"),
    ("/v1/audio/speech", {"input": "x"}, 404, None, "/v1/audio/speech"),
]


@pytest.mark.few(15)
@pytest.mark.parametrize(("path", "body", "status", "param", "words"), MALFORMED)
def test_malformed_request(steady: Running, path: str, body: Any, status: int, param: str | None, words: str) -> None:
    with steady.http() as http:
        answer = http.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert error["type"] == "invalid_request_error"
    assert re.search(words, error["message"]), error["message"]
    assert "Traceback" not in answer.text
    assert not steady.service.thread.unfinished


def test_errors_have_the_client_s_classes(steady: Running) -> None:
    client = steady.openai()
    with pytest.raises(openai.BadRequestError, match="temperature is 9"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.files.list()
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model="tiny", prompt=[5, RAISE])
    assert SECRET not in str(failed.value)


def test_a_prompt_at_the_context_s_end(steady: Running) -> None:
    with steady.http() as http:
        answer = http.post(COMPLETIONS, json={"prompt": [5] * (CONTEXT - 1), "max_tokens": 50}).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1
        chat = http.post(CHAT, json={"messages": HELLO}).json()
        assert chat["usage"]["total_tokens"] == CONTEXT, "a chat has all that is left of the context"


def test_a_model_that_raises_ends_its_own_request(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with serving(gate.engine, max_num_seqs=3) as running, caplog.at_level(logging.ERROR, "specdec.serve"):
        answers: dict[int, httpx2.Response] = {}

        def ask(first: int) -> None:
            with running.http() as http:
                answers[first] = http.post(COMPLETIONS, json={"prompt": [first, 7], "max_tokens": 20, "temperature": 0})

        clients = [Thread(target=ask, args=(first,)) for first in (WAIT, RAISE, 9)]
        for client in clients:
            client.start()
        assert gate.waits.wait(SECONDS)
        gate.opened.set()
        for client in clients:
            client.join(SECONDS)
        assert answers[RAISE].status_code == 500
        assert SECRET not in answers[RAISE].text
        assert "Traceback" not in answers[RAISE].text
        assert f"the model broke {SECRET}" in caplog.text
        assert "Traceback" in caplog.text
        for first in (WAIT, 9):
            assert answers[first].json()["choices"][0]["text"] == gate.text([first, 7], 20)


def test_a_text_for_which_no_memory_is_left_is_503_with_the_remedy(steady: Running) -> None:
    with steady.http() as http:
        answer = http.post(COMPLETIONS, json={"prompt": [FULL, 7], "max_tokens": 3})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "out_of_memory"
        assert "lower max_tokens" in answer.json()["error"]["message"], "in the request's words"
        assert http.post(COMPLETIONS, json={"prompt": [7]}).status_code == 200


def test_pieces_come_while_the_text_is_written(gate: Gate) -> None:
    with serving(gate.engine) as running:
        rule = gate.rule

        def waiting(text: list[int]) -> int:
            assert len(text) < 5 or gate.opened.wait(SECONDS)
            return rule(text)

        gate.target.rule = waiting
        asked: Any = {"model": "tiny", "prompt": [5, 6], "max_tokens": 6, "temperature": 0}
        stream = iter(running.openai().completions.create(**asked, stream=True))
        first = next(stream).choices[0].text
        gate.opened.set()
        assert first
        assert first + "".join(piece.choices[0].text for piece in stream) == gate.text([5, 6], 6)


def test_a_failure_in_a_stream_is_an_event(gate: Gate) -> None:
    with serving(gate.engine) as running:
        rule = gate.rule

        def late(text: list[int]) -> int:
            if len(text) > 6:
                raise RuntimeError(SECRET)
            return rule(text)

        gate.target.rule = late
        asked: Any = {"model": "tiny", "prompt": [5, 6], "max_tokens": 20, "temperature": 0}
        stream = running.openai().completions.create(**asked, stream=True)
        seen: list[Any] = []
        with pytest.raises(openai.APIError, match="the server failed") as failed:
            seen.extend(stream)  # a busy loop sends several tokens in one piece
        assert "".join(piece.choices[0].text for piece in seen) == gate.text([5, 6], 5)
        assert SECRET not in str(failed.value)


def test_a_step_that_fails_as_a_whole_ends_what_runs_and_no_more(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = Scheduler.step
    failures = iter([RuntimeError(SECRET)])

    def broken(self: Scheduler) -> Any:
        if not self.idle:
            for error in failures:
                raise error
        return step(self)

    monkeypatch.setattr(Scheduler, "step", broken)
    with serving(gate.engine) as running, running.http() as http:
        body = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0}
        assert http.post(COMPLETIONS, json=body).status_code == 500
        assert http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == gate.text([5, 6], 4)
        assert http.get("/health").status_code == 200
    assert SECRET in caplog.text


def test_a_full_queue_is_429(gate: Gate) -> None:
    with serving(gate.engine, max_num_seqs=1, max_queue=1) as running:
        answers: list[httpx2.Response] = []

        def ask() -> None:
            with running.http() as http:
                answers.append(http.post(COMPLETIONS, json={"prompt": [WAIT, 7], "max_tokens": 5, "temperature": 0}))

        clients = [Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        assert gate.waits.wait(SECONDS)
        with running.http() as http:
            while len(running.service.thread.unfinished) < 2:
                pass
            full = http.post(COMPLETIONS, json={"prompt": [7], "max_tokens": 5, "temperature": 0})
            assert full.status_code == 429
            assert int(full.headers["retry-after"]) >= 1
            assert full.json()["error"]["code"] == "queue_full"
            with pytest.raises(openai.RateLimitError):
                running.openai().completions.create(model="tiny", prompt=[7])
            assert http.post(COMPLETIONS, json={"prompt": [7], "n": 3}).status_code == 400
            text = http.get("/metrics").text
            assert 'num_requests_running{model_name="tiny"} 1.0' in text
            assert 'num_requests_waiting{model_name="tiny"} 1.0' in text
            gate.opened.set()
            for client in clients:
                client.join(SECONDS)
            assert [answer.json()["choices"][0]["text"] for answer in answers] == [gate.text([WAIT, 7], 5)] * 2
            assert http.post(COMPLETIONS, json={"prompt": [7]}).status_code == 200


def test_closing_a_stream_cancels_it_and_frees_its_cache(gate: Gate) -> None:
    with serving(gate.engine, max_num_seqs=1) as running:
        steps = iter(range(1000))

        def slow(text: list[int]) -> int:
            if next(steps) > 2:
                assert gate.opened.wait(SECONDS)
            return 300

        gate.target.rule = slow
        stream = running.openai().completions.create(model="tiny", prompt=[5, 6], max_tokens=50, stream=True)
        next(iter(stream))
        stream.close()
        running.call(_gone(running))
        gate.opened.set()
        running.settle()
        assert running.service.metrics.cached_bytes == 0
        assert next(steps) < 50, "it was decoded to its end"
        with running.http() as http:
            assert 'finished_reason="abort",model_name="tiny"} 1.0' in http.get("/metrics").text


async def _gone(running: Running) -> None:
    while running.service.thread.unfinished:
        await asyncio.sleep(0.001)


BODY = json.dumps({"prompt": [5, 6], "max_tokens": 40, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.mark.few(3)
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("sent", "read"),
    [
        *((part, 0) for part in (b"", b"P", HEAD[:30], HEAD, HEAD + BODY[:9])),
        *((HEAD + BODY + more, read) for more in (b"", HEAD) for read in (0, 1)),
    ],
)
def test_a_client_that_vanishes_at_any_point(steady: Running, sent: bytes, read: int, reset: bool) -> None:
    host, port = steady.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), SECONDS) as client:
        client.sendall(sent)
        if read:
            client.recv(20)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    steady.settle()
    with steady.http() as http:
        assert http.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 2}).status_code == 200
    assert steady.service.metrics.cached_bytes == 0


@pytest.mark.slow
def test_a_request_may_take_so_long(gate: Gate) -> None:
    with serving(gate.engine, request_timeout=0.3) as running, running.http() as http:
        answer = http.post(COMPLETIONS, json={"prompt": [WAIT, 7]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert "0.3 s" in answer.json()["error"]["message"]
        gate.opened.set()
        running.settle()
        assert http.post(COMPLETIONS, json={"prompt": [7]}).status_code == 200


@pytest.mark.slow
def test_a_signal_lets_running_requests_end_and_takes_no_new_ones(gate: Gate) -> None:
    with serving(gate.engine, max_num_seqs=1) as running:
        texts: list[str] = []

        def ask() -> None:
            stream = running.openai().completions.create(
                model="tiny", prompt=[WAIT, 7], max_tokens=30, temperature=0, stream=True
            )
            texts.append("".join(chunk.choices[0].text for chunk in stream))

        clients = [Thread(target=ask) for _ in range(2)]  # one runs, one waits in line
        for client in clients:
            client.start()
        while len(running.service.thread.unfinished) < 2:
            pass
        running.server.handle_exit(signal.SIGTERM, None)
        with running.http() as http:
            found = [http.post(COMPLETIONS, json={"prompt": [7]}).status_code, http.get("/health").status_code]
            assert found == [503, 503]
        gate.opened.set()
        for client in clients:
            client.join(SECONDS)
        assert texts == [gate.text([WAIT, 7], 30)] * 2
        running.thread.join(SECONDS)
        assert not running.thread.is_alive()


def test_what_runs_longer_than_the_grace_period_ends_with_an_error(gate: Gate) -> None:
    with serving(gate.engine, grace=0.0) as running:
        failures: list[Exception] = []

        def ask(stream: bool) -> None:
            try:
                answer: Any = running.openai().completions.create(model="tiny", prompt=[WAIT, 7], stream=stream)  # type: ignore[call-overload]
                list(answer)
            except openai.APIError as error:
                failures.append(error)

        clients = [Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for client in clients:
            client.start()
        while len(running.service.thread.unfinished) < 2:
            pass
        running.server.handle_exit(signal.SIGTERM, None)
        for client in clients:
            client.join(SECONDS)
        assert len(failures) == 2
        assert all("shut down" in str(failure) for failure in failures)
        gate.opened.set()
        running.thread.join(SECONDS)
        assert not running.thread.is_alive()


def test_a_second_signal_ends_it_at_once(gate: Gate) -> None:
    with serving(gate.engine, grace=100.0) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), SECONDS) as client:
            body = json.dumps({"prompt": [WAIT, 7]}).encode()
            client.sendall(HEAD.replace(b"%d" % len(BODY), b"%d" % len(body)) + body)
            assert gate.waits.wait(SECONDS)
            for _ in range(2):
                running.server.handle_exit(signal.SIGTERM, None)
            running.thread.join(20)
            assert not running.thread.is_alive()
            assert not gate.opened.is_set(), "it waited for the model"


def test_a_client_that_goes_away_while_it_waits_in_line(gate: Gate) -> None:
    with serving(gate.engine, max_num_seqs=1) as running:
        host, port = running.url.removeprefix("http://").split(":")
        first, second = (socket.create_connection((host, int(port)), SECONDS) for _ in range(2))
        body = json.dumps({"prompt": [WAIT, 7]}).encode()
        for place, client in enumerate((first, second)):
            client.sendall(HEAD.replace(b"%d" % len(BODY), b"%d" % len(body)) + body)
            assert gate.waits.wait(SECONDS)
            while len(running.service.thread.unfinished) <= place:
                pass
        second.close()
        while len(running.service.thread.unfinished) > 1:
            pass
        gate.opened.set()
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        first.close()
        running.settle()
        assert running.service.metrics.cached_bytes == 0


def test_a_key_is_asked_for(gate: Gate) -> None:
    with serving(gate.engine, api_key="sesame") as running:
        with running.http() as http:
            assert http.get("/health").status_code == 200
            for path in ("/v1/models", "/metrics", "/nothing"):
                assert http.get(path).status_code == 401
            for given in ("", "sesame", "Bearer", "Bearer sesam", "Basic sesame", "Bearer sesame2"):
                answer = http.post(COMPLETIONS, json={"prompt": [7]}, headers={"Authorization": given})
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert http.get("/v1/models", headers={"Host": "example.org", "Authorization": "Bearer sesame"}).is_success
        with pytest.raises(openai.AuthenticationError):
            running.openai("other").models.list()
        assert running.openai("sesame").completions.create(model="tiny", prompt=[7]).choices


@pytest.mark.slow
def test_pages_of_others_may_not_call(gate: Gate) -> None:
    with serving(gate.engine, allow_origin=["https://mine.example"]) as running, running.http() as http:

        def status(**headers: str) -> int:
            return http.post(COMPLETIONS, json={"prompt": [7]}, headers=headers).status_code

        assert status() == status(Origin=running.url) == 200
        assert status(Origin="https://other.example") == 403
        assert status(Host="other.example") == 403, "a name that was led here"
        assert status(Origin="https://mine.example") == 200
        asked = {"Origin": "https://mine.example", "Access-Control-Request-Method": "POST"}
        allowed = http.options(COMPLETIONS, headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://mine.example"
    with serving(gate.engine) as running, running.http() as http:
        answer = http.options(COMPLETIONS, headers=asked)
        assert "access-control-allow-origin" not in answer.headers


def test_headers_are_bounded(steady: Running) -> None:
    with steady.http() as http:
        assert http.get("/health", headers={"x": "y" * 100_000}).status_code in (400, 431)
    host, port = steady.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), SECONDS) as client:
        chunk = b"%x\r\n%s\r\n" % (15_000, b"x" * 15_000)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head + chunk + chunk)
        assert b" 413 " in client.recv(1000), "a body that does not say its size"


def test_the_log_holds_no_prompt(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "specdec.serve"), serving(gate.engine) as running, running.http() as http:
        assert http.post(COMPLETIONS, json={"prompt": SECRET, "max_tokens": 3}).status_code == 200
        http.post(COMPLETIONS, json={"prompt": SECRET, "temperature": 9})
        assert "/v1/completions" in caplog.text
        assert SECRET not in caplog.text
        running.service.config = replace(running.service.config, log_prompts=True)
        http.post(COMPLETIONS, json={"prompt": SECRET, "max_tokens": 3})
    assert SECRET in caplog.text
