"""pydantic-ai: what its users do, each a function."""

# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///

from common import ASK, MODEL, V1
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: str = Field(max_length=20)


provider = OpenAIProvider(base_url=V1, api_key="none")


def run(kind, **more):
    return (
        Agent(kind(MODEL, provider=provider), model_settings={"max_tokens": 60, "temperature": 0}, **more)
        .run_sync(ASK)
        .output
    )


def use_text():
    assert run(OpenAIChatModel)


def use_output_tool():
    assert run(OpenAIChatModel, output_type=City).city is not None


def use_native_output():
    assert run(OpenAIChatModel, output_type=NativeOutput(City)).city is not None


def use_responses():
    assert run(OpenAIResponsesModel)
