"""What requests share over HTTP, and what a stream tells of its steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec import Engine, SamplingParams
from specdec.engine.prefix_tree import PrefixTree
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.step.cache import KVCache
from tests.serving import Running, serving

SYSTEM = {"role": "system", "content": "You answer questions about small Python programs, and you are brief. " * 3}


def asked(number: int) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": f"What does program {number} do?"}]


def whole(http: Any, messages: list[dict[str, str]], **fields: Any) -> Any:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    return http.post("/v1/chat/completions", json=body).raise_for_status().json()


@pytest.mark.slow
def test_what_several_requests_begin_with_is_run_once(served_engine: Engine) -> None:
    with serving(served_engine) as running, running.http() as http:
        cached = list[int]()
        for number in (1, 2, 1):
            answer = whole(http, asked(number))
            expected = served_engine.generate(asked(number), 8)
            assert answer["choices"][0]["message"]["content"].strip() == expected.text.strip()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert answer["usage"]["prompt_tokens"] == expected.stats.prompt_tokens
        shared = len(served_engine.encode([SYSTEM, {"role": "user", "content": ""}]))
        assert cached[0] == 0
        assert shared - 8 < cached[1] < expected.stats.prompt_tokens - 1
        assert cached[2] == expected.stats.prompt_tokens - 1
        assert "specdec:prefix_bytes" in http.get("/metrics").text


@pytest.mark.slow
def test_prefixes_may_be_left_out(served_engine: Engine) -> None:
    with serving(served_engine, prefix_bytes=0) as running, running.http() as http:
        for _ in range(2):
            assert whole(http, asked(1))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.slow
def test_prefixes_keep_to_their_bytes(served_engine: Engine) -> None:
    """Of six questions the latest are kept, with what all begin with once."""
    kept, most = list[int](), 1 << 30
    for questions in (1, 6):
        with serving(served_engine, prefix_bytes=most) as running, running.http() as http:
            for number in range(questions):
                whole(http, asked(number))
            running.settle()
            assert running.service.prefixes is not None
            kept.append(running.service.prefixes.nbytes)
        assert 0 < kept[-1] <= most
        most = kept[0] + kept[0] // 4
    assert kept[0] < kept[1]


@pytest.mark.slow
def test_kept_beginnings_make_room_for_running_texts(served_engine: Engine) -> None:
    prompts = [served_engine.encode(f"program {number} is " * 9) for number in range(12)]
    size = max(map(len, prompts)) + 8
    specs: Any = getattr(served_engine.target, "specs", ())
    most = KVCache.most_bytes(specs, capacity=size, rows=served_engine.max_rows) * 5 // 2
    tree, texts = PrefixTree(1 << 30), dict[int, list[int]]()
    scheduler = Scheduler(served_engine, batch=2, cache_bytes=most, prefixes=tree)
    for prompt in prompts:
        scheduler.submit(Request(prompt, 8, prefix_cache=tree))
    kept = list[int]()
    while not scheduler.idle:
        texts |= {event.index: event.generation().token_ids for event in scheduler.step() if event.last}
        kept.append(tree.nbytes)
        assert kept[-1] + scheduler.cache_bytes <= most
    assert max(kept) > 0
    assert [texts[place] for place in range(12)] == [served_engine.generate(one, 8).token_ids for one in prompts]


@pytest.mark.few(1)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_tells_its_steps_where_it_is_asked(running: Running, served_engine: Engine, path: str) -> None:
    text = "def add(a, b):\n    return a + b\n\ndef "
    chat = "chat" in path
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    expected = served_engine.generate(prompt.get("messages", text), 24, SamplingParams(temperature=0.0))
    with running.http() as http:
        for trace in (True, False):
            body = {**prompt, "max_tokens": 24, "temperature": 0, "stream": True, "speculation": {"trace": trace}}
            lines = http.post(path, json=body).raise_for_status().text.splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            steps = [chunk["specdec"] for chunk in chunks if "specdec" in chunk]
            if not trace:
                assert steps == []
                continue
            assert [step["index"] for step in steps] == list(range(len(steps)))
            assert [token for step in steps for token in step["token_ids"]] == expected.token_ids
            assert len(steps) < 24
            assert {source for step in steps for source in step["sources"]} == {"prompt_lookup", "target"}
            for step in steps:
                tree = step["tree"]
                assert [tree["token_ids"][row] for row in tree["path"][1:]] == step["token_ids"][:-1]
        answer = http.post(path, json={**body, "stream": False, "speculation": {"trace": True}}).json()
        assert "specdec" not in answer
