"""The anthropic package: what its users do, each a function."""

# /// script
# dependencies = ["anthropic==2.14.0"]
# ///

import anthropic
from common import ASK, BASE, MODEL, SCHEMA

client = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0, timeout=300)
talk = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "max_tokens": 24, "system": "Be brief."}
tools = [{"name": "look", "input_schema": SCHEMA}]


def use_messages():
    assert client.messages.create(**talk).content[0].text


def use_stream():
    with client.messages.stream(**talk) as stream:
        assert "".join(stream.text_stream)


def use_tools():
    assert (
        client.messages.create(**{**talk, "max_tokens": 60}, tools=tools, tool_choice={"type": "any"}).content[0].name
        == "look"
    )


def use_tools_auto():
    client.messages.create(**talk, tools=tools)


def use_count_tokens():
    assert client.messages.count_tokens(model=MODEL, messages=talk["messages"]).input_tokens > 5
