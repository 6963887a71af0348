"""The Responses and Messages APIs by their official clients; log-probabilities of prompts; small endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

from specdec import Engine
from specdec.serve.errors import ApiError
from specdec.serve.stored import Stored, StoredResponses
from tests.models import live
from tests.serving import SECONDS, Running, serving

if TYPE_CHECKING:
    import anthropic  # where it is used: each worker would take two seconds for it

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"c": {"enum": ["Paris"]}},
    "required": ["c"],
    "additionalProperties": False,
}
QUESTION = "def add(a, b):"
TALK: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.openai()


@pytest.fixture(scope="module")
def claude(running: Running) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        yield client


def chat(client: openai.OpenAI, **more: Any) -> Any:
    options: dict[str, Any] = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 24, **more}
    return client.chat.completions.create(**options)


@pytest.mark.slow
def test_a_response_is_the_chat_s_text(client: openai.OpenAI) -> None:
    text = chat(client).choices[0].message.content
    options: dict[str, Any] = {"model": "tiny", "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**options)
    assert (whole.output_text, whole.status) == (text, "incomplete")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert (whole.usage.output_tokens, whole.usage.total_tokens) == (24, 24 + whole.usage.input_tokens)
    events = [*client.responses.create(**options, stream=True)]
    kinds = [event.type for event in events]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.incomplete"


@pytest.mark.slow
def test_a_response_goes_on_from_a_stored_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(input=QUESTION, **options)
    second = client.responses.create(input="Again.", previous_response_id=first.id, **options)
    talk = [*TALK, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Again."}]
    assert second.output_text == chat(client, messages=talk, max_tokens=8).choices[0].message.content
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    for lost in (first.id, client.responses.create(input="x", store=False, **options).id):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.retrieve(lost)
        with pytest.raises(openai.BadRequestError, match="send the conversation as input") as caught:
            client.responses.create(input="Again.", previous_response_id=lost, **options)
        assert caught.value.code == "previous_response_not_found"


def test_stored_responses_are_bounded_and_belong_to_their_key() -> None:
    kept = StoredResponses(most=2, most_bytes=300)

    def put(name: str, size: int = 1) -> None:
        kept.put("a", Stored({"id": name, "text": "x" * size}, []))

    for name in ("1", "2", "3"):
        put(name)
    with pytest.raises(ApiError, match="there is no response '3'"):
        kept.get("b", "3")
    with pytest.raises(ApiError, match="there is no response '1'"):
        kept.get("a", "1")
    put("4", 250)
    assert kept.get("a", "4")
    with pytest.raises(ApiError, match="there is no response '3'"):
        kept.get("a", "3")
    kept.delete("a", "4")
    put("5", 250)
    assert kept.get("a", "5")


@pytest.mark.slow
def test_a_response_has_calls_and_forms(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    options: dict[str, Any] = {"model": "tiny", "input": QUESTION, "tools": [tool], "max_output_tokens": 100}
    chosen: Any = {"type": "function", "name": "look"}
    for choice in ("required", chosen):
        (call,) = client.responses.create(**options, tool_choice=choice).output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"c": "Paris"})
    with client.responses.stream(**options, tool_choice=chosen) as events:
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        (streamed,) = events.get_final_response().output
    assert "".join(deltas) == streamed.arguments == call.arguments
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"c": "Paris"}'},
        {"type": "function_call_output", "call_id": "a", "output": "a tower"},
    ]
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    found = client.responses.create(model="tiny", input=items, instructions="Be brief.", text=form)
    assert (json.loads(found.output_text), found.status) == ({"c": "Paris"}, "completed")
    with pytest.raises(openai.BadRequestError, match=r"tools\.0 is of type 'web_search', and this server has no tools"):
        client.responses.create(model="tiny", input="x", tools=[{"type": "web_search"}])
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    with pytest.raises(openai.BadRequestError, match=r"input\.0\.content\.0 is a part of type 'input_image'"):
        client.responses.create(model="tiny", input=image)


def test_a_message_is_the_chat_s_text(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    answer = chat(client, messages=[{"role": "system", "content": "Be brief."}, *TALK])
    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 24,
        "messages": TALK,
        "system": "Be brief.",
        "extra_body": {"temperature": 0},
    }
    whole = claude.messages.create(**options)
    (block,) = whole.content
    assert (block.type, block.text, whole.stop_reason) == ("text", answer.choices[0].message.content, "max_tokens")
    usage = whole.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == answer.usage.prompt_tokens
    counted = claude.messages.count_tokens(model="tiny", messages=TALK, system="Be brief.")
    assert counted.input_tokens == answer.usage.prompt_tokens
    with claude.messages.stream(**options) as events:
        streamed = events.get_final_message()
    assert (streamed.content[0].text, streamed.stop_reason) == (block.text, "max_tokens")
    assert streamed.usage.output_tokens == 24
    stop = block.text[3:5]
    cut = claude.messages.create(**{**options, "stop_sequences": ["never", stop]})
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.slow
def test_a_message_calls_tools(claude: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 100,
        "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}],
        "messages": [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I do."},
                    {"type": "tool_use", "id": "a", "name": "look", "input": {"c": "Paris"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "a tower"}]},
        ],
    }
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
        whole = claude.messages.create(**options, tool_choice=choice)
        (call,) = whole.content
        assert (call.type, call.name, call.input, whole.stop_reason) == ("tool_use", "look", {"c": "Paris"}, "tool_use")
        with claude.messages.stream(**options, tool_choice=choice) as events:
            (streamed,) = events.get_final_message().content
        assert streamed.input == {"c": "Paris"}


@pytest.mark.slow
def test_errors_in_anthropic_s_form(tiny_engine: Engine, claude: anthropic.Anthropic) -> None:
    import anthropic

    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    content: Any = [{"type": "text", "text": "x"}, image]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.1 is a part of type") as caught:
        claude.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": content}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        claude.messages.create(model="other", max_tokens=1, messages=TALK)
    with serving(tiny_engine, api_key="right", max_body_bytes=1000) as locked:
        for key, status in (("wrong", 401), ("right", 413)):
            with anthropic.Anthropic(base_url=locked.url, api_key=key, max_retries=0) as other:
                with pytest.raises(anthropic.APIStatusError) as caught:
                    other.messages.create(model="tiny", max_tokens=1, messages=TALK, system="x" * 2000)
                assert (caught.value.status_code, caught.value.body["type"]) == (status, "error")  # type: ignore[index]
                if key == "right":
                    assert other.messages.create(model="tiny", max_tokens=1, messages=TALK).usage.output_tokens == 1


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_log_probabilities_of_a_prompt_are_the_model_s(running: Running, tiny_engine: Engine, drafter: str) -> None:
    prompt = tiny_engine.encode("x = 1\nx = 1\nimport os\n")
    (end,) = tiny_engine.target.eos_ids
    prompt = [*prompt, end, *prompt]  # an end within a prompt ends nothing
    with torch.no_grad():
        scores = live(tiny_engine.target)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    wanted = [scores[place, token].item() for place, token in enumerate(prompt[1:])]
    body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 6, "speculation": {"drafter": drafter}}
    with running.http() as http:

        def choice(**more: Any) -> Any:
            answer = http.post("/v1/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] == len(prompt)
            assert usage["completion_tokens"] == more.get("max_tokens", 6)
            return answer.json()["choices"][0]

        plain = choice(logprobs=2)
        text = tiny_engine.tokenizer.decode(prompt, skip_special_tokens=True)
        found = choice(echo=True, logprobs=2)
        told = found["logprobs"]
        assert found["text"] == text + plain["text"]
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][1 : len(prompt)] == pytest.approx(wanted, abs=1e-4)
        assert told["token_logprobs"][len(prompt) :] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
        assert told["tokens"][len(prompt) :] == plain["logprobs"]["tokens"]
        assert len(told["text_offset"]) == len(prompt) + 6
        bare = choice(echo=True, logprobs=0, max_tokens=0)
        assert bare["text"] == text
        assert bare["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
        listed = choice(prompt_logprobs=1)
        assert listed["text"] == plain["text"]
        own = zip(prompt[1:], listed["prompt_logprobs"][1:], strict=True)
        assert [one[str(token)]["logprob"] for token, one in own] == pytest.approx(wanted, abs=1e-4)
        assert choice(echo=True)["text"] == text + plain["text"]
        one = http.post("/v1/completions", json={"prompt": [5], "echo": True, "logprobs": 1, "max_tokens": 0}).json()
        assert one["choices"][0]["logprobs"]["token_logprobs"] == [None]
        assert one["usage"]["completion_tokens"] == 0
        refused = http.post("/v1/completions", json={**body, "echo": True, "logprobs": 1, "stream": True})
        assert refused.status_code == 400
        stream = http.post("/v1/completions", json={**body, "echo": True, "stream": True}).text.split("data: ")[1:-1]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in stream) == text + plain["text"]
        listed = http.post(
            "/v1/chat/completions", json={"messages": TALK, "max_tokens": 1, "prompt_logprobs": 0}
        ).json()
        assert len(listed["prompt_logprobs"]) == listed["usage"]["prompt_tokens"]


def test_small_endpoints(running: Running, tiny_engine: Engine) -> None:
    with running.http() as http:
        info = http.get("/tokenizer_info").json()
        assert info["eos_token"] == tiny_engine.tokenizer.eos_token
        assert http.get("/props").json()["total_slots"] == 4
        assert http.get("/ping").status_code == 200
        assert http.get("/load").json() == {"server_load": 0}
        for path in ("/v1/embeddings", "/infill", "/v1/fim/completions"):
            answer = http.post(path, json={"input": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")
        answer = http.post("/v1/completions", json={"prompt": "def f(", "suffix": "):"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
        assert "fill-in-the-middle is not served" in answer.json()["error"]["message"]
