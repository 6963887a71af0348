"""openai-agents: what its users do, each a function."""

# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import ASK, MODEL, V1
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=V1, api_key="none", max_retries=0, timeout=300)


@function_tool
def look(city: str) -> str:
    "Looks at a city."
    return "sunny"


def run(kind, **more):
    agent = Agent(
        name="a",
        instructions="Be brief.",
        model=kind(MODEL, client),
        model_settings=ModelSettings(max_tokens=24),
        **more,
    )
    return asyncio.run(Runner.run(agent, ASK, max_turns=4)).final_output


def use_responses():
    assert run(OpenAIResponsesModel)


def use_responses_with_a_tool():
    run(OpenAIResponsesModel, tools=[look])


def use_chat():
    assert run(OpenAIChatCompletionsModel)


def use_chat_with_a_tool():
    run(OpenAIChatCompletionsModel, tools=[look])
