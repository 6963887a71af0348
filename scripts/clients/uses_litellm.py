"""litellm: what its users do, each a function."""

# /// script
# dependencies = ["litellm==1.110.2"]
# ///

import litellm
from common import ASK, MODEL, SCHEMA, V1

talk = {
    "model": "openai/" + MODEL,
    "api_base": V1,
    "api_key": "none",
    "messages": [{"role": "user", "content": ASK}],
    "max_tokens": 40,
    "timeout": 300,
}
tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def use_chat():
    assert litellm.completion(**talk).choices[0].message.content


def use_stream():
    assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(**talk, stream=True))


def use_tools():
    assert litellm.completion(**talk, tools=[tool], tool_choice="required").choices[0].message.tool_calls


def use_hosted_vllm():
    assert (
        litellm.completion(**{**talk, "model": "hosted_vllm/" + MODEL}, reasoning_effort="low")
        .choices[0]
        .message.content
    )


def use_assistant_without_content():
    litellm.completion(
        **{**talk, "messages": talk["messages"] + [{"role": "assistant", "content": None}, talk["messages"][0]]}
    )


def use_text_completion():
    assert (
        litellm.text_completion(
            model="text-completion-openai/" + MODEL, api_base=V1, api_key="none", prompt="def add(", max_tokens=8
        )
        .choices[0]
        .text
    )


def use_responses():
    assert litellm.responses(
        model="openai/" + MODEL, api_base=V1, api_key="none", input=ASK, max_output_tokens=24
    ).output
