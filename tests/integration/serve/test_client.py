"""The official client of OpenAI talks with a server, and texts are those of the engine."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from specdec import Engine, SamplingParams
from tests.serving import Running

MESSAGES: Any = [{"role": "user", "content": "def add(a, b):"}]
PROMPT = "def add(a, b):\n    return"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["add", "sub"]},
        "exact": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "exact", "count"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.openai()


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **options})


def test_chat_is_the_engine_s_answer(client: openai.OpenAI, served_engine: Engine) -> None:
    wanted = served_engine.generate(MESSAGES, 24)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=24, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(wanted.token_ids) == 24
    assert answer.usage.prompt_tokens == wanted.stats.prompt_tokens


def test_stream_adds_up_to_the_answer(client: openai.OpenAI, served_engine: Engine) -> None:
    wanted = served_engine.generate(MESSAGES, 24, sampled(seed=7))
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=24,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == wanted.text
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices[0].finish_reason] == ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


@pytest.mark.slow
def test_completion_of_several_prompts_of_every_kind(client: openai.OpenAI, served_engine: Engine) -> None:
    tokens = served_engine.encode(PROMPT)
    for prompt, prompts in (
        (PROMPT, [PROMPT]),
        (tokens, [PROMPT]),
        ([PROMPT, "import os"], [PROMPT, "import os"]),
        ([tokens, tokens[:3]], [tokens, tokens[:3]]),
    ):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0, n=1)  # type: ignore[arg-type]
        assert [choice.text for choice in answer.choices] == [served_engine.generate(one, 9).text for one in prompts]


@pytest.mark.slow
def test_n_answers_have_seeds_in_a_row(client: openai.OpenAI, served_engine: Engine) -> None:
    wanted = [served_engine.generate(MESSAGES, 12, sampled(seed=seed)).text for seed in (5, 6, 7)]
    assert len(set(wanted)) == 3
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 5, "n": 3}
    answer = client.chat.completions.create(**options)
    assert [choice.message.content for choice in answer.choices] == wanted
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == wanted


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_and_none_another(client: openai.OpenAI) -> None:
    def text(**seed: int) -> str | None:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, **seed)  # type: ignore[call-overload]
        return answer.choices[0].message.content  # type: ignore[no-any-return]

    assert text(seed=11) == text(seed=11)
    assert len({text() for _ in range(3)}) == 3, "without a seed, or a temperature, OpenAI's default is to sample"


@pytest.mark.few(1)
@pytest.mark.parametrize("stop", ["(", ["zzz", "re"]])
def test_stop_strings(client: openai.OpenAI, served_engine: Engine, stop: Any) -> None:
    wanted = served_engine.generate(PROMPT, 60, stop=stop)
    assert wanted.finish_reason == "stop"
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted.text, "stop")
    chunks = list(
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, stop=stop, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted.text


def test_logprobs_of_a_chat(client: openai.OpenAI, served_engine: Engine) -> None:
    wanted = served_engine.generate(MESSAGES, 6, logprobs=2)
    assert wanted.logprobs is not None
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs.content
    streamed = [
        one
        for chunk in client.chat.completions.create(**options, logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    for shown in (found, streamed):
        assert [one.logprob for one in shown] == [one.logprob for one in wanted.logprobs]
        assert [[top.logprob for top in one.top_logprobs] for one in shown] == [
            [value for _, value in one.top] for one in wanted.logprobs
        ]
        assert b"".join(bytes(one.bytes) for one in shown).decode() == wanted.text
    plain = client.chat.completions.create(**options)
    assert plain.choices[0].logprobs is None


def test_logprobs_of_a_completion(client: openai.OpenAI, served_engine: Engine) -> None:
    wanted = served_engine.generate(PROMPT, 6, logprobs=3)
    assert wanted.logprobs is not None
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs == [one.logprob for one in wanted.logprobs]
    assert "".join(found.tokens) == wanted.text
    assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(6)]
    assert found.top_logprobs is not None
    assert [sorted(one.values(), reverse=True) for one in found.top_logprobs] == [
        [value for _, value in one.top] for one in wanted.logprobs
    ]


def test_logit_bias_bans_and_forces(client: openai.OpenAI, served_engine: Engine) -> None:
    first = served_engine.generate(PROMPT, 1).token_ids[0]
    forced = served_engine.encode("x")[-1]
    options: Any = {"model": "tiny", "prompt": PROMPT, "temperature": 0}
    banned = client.completions.create(**options, max_tokens=1, logit_bias={str(first): -100})
    assert banned.choices[0].text != served_engine.tokenizer.decode([first])
    only = client.completions.create(**options, max_tokens=3, logit_bias={str(forced): 100})
    assert only.choices[0].text == "xxx"


@pytest.mark.slow
def test_penalties_lower_what_the_answer_has(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": "x = 1\n" * 8, "temperature": 0, "max_tokens": 24, "logprobs": 0}

    def tokens(**penalties: float) -> list[str]:
        answer = client.completions.create(**options, **penalties)
        assert answer.choices[0].logprobs is not None
        return answer.choices[0].logprobs.tokens or []

    plain = tokens()
    assert len(set(plain)) < 12, "the test needs a text that repeats"
    for penalties in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert len(set(tokens(**penalties))) > len(set(plain))
    assert tokens(frequency_penalty=0.0) == plain


@pytest.mark.slow
def test_json_schema_is_followed(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "entry", "schema": SCHEMA, "strict": True}}
    for seed in range(2):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=form, seed=seed, max_tokens=200
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_json_object_is_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, seed=1, max_tokens=400
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_forced_call_follows_its_schema(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "seed": 3}
    if stream:
        name, arguments, content, reason = "", "", "", None
        for chunk in client.chat.completions.create(**options, max_tokens=300, stream=True):
            delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
            content += delta.content or ""
            for call in delta.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    else:
        answer = client.chat.completions.create(**options, max_tokens=300)
        (call,) = answer.choices[0].message.tool_calls
        assert call.id.startswith("call_")
        name, arguments, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
        content = answer.choices[0].message.content or ""
    assert (name, content) == ("look_up", "")
    assert reason == ("tool_calls" if choice == "required" else "stop")
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_tools_are_shown_to_the_model_unless_they_are_not_wanted(running: Running) -> None:
    with running.http() as http:

        def count(**more: Any) -> int:
            answer = http.post(
                "/v1/chat/completions", json={"messages": MESSAGES, "tools": [TOOL], "max_tokens": 1, **more}
            )
            return int(answer.json()["usage"]["prompt_tokens"])

        assert count() == count(tool_choice="auto") > count(tool_choice="none")


@pytest.mark.slow
def test_figures_of_speculation(running: Running) -> None:
    body = {"prompt": "a = 1\n" * 12, "max_tokens": 40, "temperature": 0, "speculation": {"per_step": True}}
    with running.http() as http:
        answer = http.post("/v1/completions", json=body).json()
        found, times = answer["metrics"]["speculative_decoding"], answer["timings"]
        streamed = http.post(
            "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
    assert found["num_spec_steps"] == len(found["per_step_drafted"]) == sum(found["acceptance_histogram"].values()) > 0
    assert found["num_accepted_draft_tokens"] == sum(found["per_step_accepted"]) > 0
    assert found["num_draft_tokens"] == sum(found["per_step_drafted"])
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    assert found["draft_acceptance_rate"] == found["num_accepted_draft_tokens"] / found["num_draft_tokens"]
    assert (times["draft_n"], times["draft_n_accepted"]) == (found["num_draft_tokens"], sum(found["per_step_accepted"]))
    assert times["predicted_n"] == 40
    assert times["prompt_n"] + times["cache_n"] == answer["usage"]["prompt_tokens"]
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"] == []
    assert last["metrics"]["speculative_decoding"].keys() == found.keys()


@pytest.mark.slow
def test_a_request_names_its_drafter(running: Running, served_engine: Engine) -> None:
    prompt = "a = 1\n" * 12
    wanted = served_engine.generate(prompt, 30).text
    drafted = {}
    with running.http() as http:
        allowed = http.get("/v1/models").json()["data"][0]["specdec"]
        assert allowed["default_drafter"] == "prompt_lookup"
        assert allowed["drafters"][0] == "none"
        for name in allowed["drafters"]:
            body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "speculation": {"drafter": name}}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == wanted
            drafted[name] = answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
        body["speculation"] = {"max_rows": 2, "per_step": True}
        few = http.post("/v1/completions", json=body).json()["metrics"]["speculative_decoding"]
        text = http.get("/metrics").text
    assert drafted.pop("none") == 0
    assert sum(count > 0 for count in drafted.values()) > 2
    assert set(few["per_step_drafted"]) == {1}
    for name in ("none", "lookahead", "prompt_lookup"):
        assert f'specdec:steps_total{{drafter="{name}"' in text


def test_predicted_outputs(client: openai.OpenAI, served_engine: Engine) -> None:
    wanted = served_engine.generate(MESSAGES, 30).text
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    for content in (wanted, [{"type": "text", "text": wanted[:20]}, {"type": "text", "text": wanted[20:]}]):
        answer = client.chat.completions.create(**options, prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == wanted
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 20
        assert answer.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 20
    answer = client.chat.completions.create(**options, prediction={"type": "content", "content": "no such thing"})
    assert answer.choices[0].message.content == wanted
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_the_page_may_load_nothing_from_elsewhere(running: Running) -> None:
    with running.http() as http:
        page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]


# What front ends and load tools send beside the rest, as its values that ask for nothing.
CHAT_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("logprobs", "top_logprobs", "stop", "seed", "tools", "tool_choice", "response_format", "n"), None),
    **{"store": False, "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True, "user": "x", "priority": 0},
    **{"modalities": ["text"], "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "top_k": -1},
    **{"min_p": 0, "repetition_penalty": 1, "skip_special_tokens": True, "add_special_tokens": False, "min_tokens": 0},
    **{"include_stop_str_in_output": False, "stop_token_ids": [], "add_generation_prompt": True, "echo": False},
    **{"continue_final_message": False, "chat_template_kwargs": {"enable_thinking": False}, "request_id": "x"},
}
COMPLETION_FIELDS: dict[str, Any] = {
    **{"best_of": 1, "echo": False, "suffix": None, "logprobs": None, "length_penalty": 1.0, "use_beam_search": False},
    **{"add_special_tokens": True, "spaces_between_special_tokens": True, "ignore_eos": False, "stop": []},
}


def test_fields_that_ask_for_nothing_are_taken(running: Running) -> None:
    with running.http() as http:
        for path, prompt, fields in (
            ("/v1/chat/completions", {"messages": MESSAGES}, CHAT_FIELDS),
            ("/v1/completions/", {"prompt": PROMPT}, COMPLETION_FIELDS),
        ):
            body = {**prompt, "max_tokens": 4, "temperature": 0}
            plain, found = (
                http.post(path, json=one).raise_for_status().json()["choices"] for one in (body, {**body, **fields})
            )
            assert found == plain


def test_no_end_before_so_many_tokens(client: openai.OpenAI, served_engine: Engine) -> None:
    ends = served_engine.generate(PROMPT, 4).token_ids[1]
    for least in (None, 5):
        answer = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=9,
            temperature=0,
            extra_body={"stop_token_ids": [ends], "min_tokens": least},
        )
        assert answer.usage is not None
        assert (answer.usage.completion_tokens == 2) == (least is None)
        assert answer.usage.completion_tokens == 2 or answer.usage.completion_tokens >= 6


def test_an_answer_goes_on_with_the_last_message(client: openai.OpenAI, served_engine: Engine) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "The function"}]
    tokenizer = served_engine.tokenizer
    prompt = tokenizer.apply_chat_template(begun, continue_final_message=True, return_dict=True)["input_ids"]
    answer = client.chat.completions.create(
        model="tiny", messages=begun, max_tokens=8, temperature=0, extra_body={"continue_final_message": True}
    )
    assert answer.choices[0].message.content == served_engine.generate(list(prompt), 8).text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


def test_every_piece_may_tell_the_usage(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 9


def test_probes(running: Running) -> None:
    with running.http() as http:
        for path in (
            "/",
            "/health",
            "/health/",
            "/v1/models",
            "/v1/models/",
            "/v1/models/tiny",
            "/version",
            "/metrics",
        ):
            for method in ("GET", "HEAD"):
                assert http.request(method, path).status_code == 200, (method, path)
        assert http.get("/v1/models/").json() == http.get("/v1/models").json()


def test_models_health_version_and_figures(running: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "specdec"
    with running.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").json()["version"]
        http.post("/v1/completions", json={"prompt": "a = 1\n" * 12, "max_tokens": 40, "temperature": 0})
        text = http.get("/metrics").text
    for name in (
        *(
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
        ),
        *(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "time_to_first_token_seconds_count",
            "time_per_output_token_seconds_count",
        ),
        *("num_requests_running", "num_requests_waiting"),
        *(f"request_{part}_time_seconds_count" for part in ("queue", "prefill", "decode", "inference")),
        *("e2e_request_latency_seconds_count", "request_prompt_tokens_sum", "request_generation_tokens_sum"),
        *("generation_tokens_total", "prompt_tokens_total", "request_success_total"),
    ):
        assert f"vllm:{name}{{" in text, name
    for name in ("rows_total", "steps_total", "resting_share", "cache_bytes"):
        assert f"specdec:{name}{{" in text, name


def test_tokenize_and_detokenize(running: Running, served_engine: Engine) -> None:
    with running.http() as http:
        found = http.post("/tokenize", json={"model": "tiny", "prompt": PROMPT}).json()
        assert found["tokens"] == served_engine.encode(PROMPT)
        assert found["count"] == len(found["tokens"])
        text = served_engine.tokenizer.decode(found["tokens"])
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text, "content": text}
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert chat["tokens"] == served_engine.encode(MESSAGES)


def test_parts_of_text_are_one_text(client: openai.OpenAI, served_engine: Engine) -> None:
    wanted = served_engine.generate([{"role": "user", "content": "def add\n(a, b):"}], 8).text
    parts: Any = [{"type": "text", "text": "def add"}, {"type": "text", "text": "(a, b):"}]
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content == wanted
