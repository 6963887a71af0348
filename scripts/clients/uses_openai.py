"""The openai package: what its users do, each a function."""

# /// script
# dependencies = ["openai==3.57.0", "pydantic==2.14.3"]
# ///

import json

import openai
from common import ASK, MODEL, SCHEMA, V1
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=V1, api_key="none", max_retries=0, timeout=300)
talk = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "max_tokens": 24, "temperature": 0}


class City(BaseModel):
    city: str = Field(max_length=20)


tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}


def use_models():
    assert client.models.list().data[0].id == MODEL


def use_chat():
    assert client.chat.completions.create(**talk).choices[0].message.content


def use_stream():
    assert "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**talk, stream=True))


def use_parse():
    assert (
        client.chat.completions.parse(**{**talk, "max_tokens": 60}, response_format=City).choices[0].message.parsed.city
        is not None
    )


def use_tools_auto():
    client.chat.completions.create(**talk, tools=[tool])


def use_tools_required():
    call = (
        client.chat.completions.create(**{**talk, "max_tokens": 60}, tools=[tool], tool_choice="required")
        .choices[0]
        .message.tool_calls[0]
    )
    assert "city" in json.loads(call.function.arguments)


def use_history_with_tools():
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"city": "Paris"}'}}
    more = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    assert (
        client.chat.completions.create(**{**talk, "messages": talk["messages"] + more}, tools=[tool])
        .choices[0]
        .message.content
        is not None
    )


def use_completions():
    assert client.completions.create(model=MODEL, prompt="def add(a, b):", max_tokens=8).choices[0].text


def use_echo():
    assert (
        client.completions.create(model=MODEL, prompt="a b c", max_tokens=1, echo=True, logprobs=1)
        .choices[0]
        .logprobs.token_logprobs[0]
        is None
    )


def use_reasoning_effort():
    client.chat.completions.create(**talk, reasoning_effort="none")


def use_responses():
    assert client.responses.create(model=MODEL, input=ASK, max_output_tokens=24).output_text


def use_responses_stream():
    assert list(client.responses.create(model=MODEL, input=ASK, max_output_tokens=24, stream=True))[
        -1
    ].response.output_text


def use_responses_tools():
    flat = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    found = client.responses.create(model=MODEL, input=ASK, tools=[flat], tool_choice="required", max_output_tokens=60)
    assert found.output[0].type == "function_call"


def use_responses_parse():
    assert client.responses.parse(model=MODEL, input=ASK, text_format=City, max_output_tokens=60).output_parsed
