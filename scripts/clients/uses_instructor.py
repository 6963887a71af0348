"""instructor: what its users do, each a function."""

# /// script
# dependencies = ["instructor==1.17.0"]
# ///

import instructor
import openai
from common import ASK, MODEL, V1
from pydantic import BaseModel, Field


class City(BaseModel):
    city: str = Field(max_length=20)


def made(mode):
    client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key="none", max_retries=0, timeout=300), mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": ASK}], response_model=City, max_tokens=60, max_retries=0
    )


def use_tools():
    assert made(instructor.Mode.TOOLS).city is not None


def use_tools_strict():
    assert made(instructor.Mode.TOOLS_STRICT).city is not None


def use_json_schema():
    assert made(instructor.Mode.JSON_SCHEMA).city is not None
