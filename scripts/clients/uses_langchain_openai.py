"""langchain-openai: what its users do, each a function."""

# /// script
# dependencies = ["langchain-openai==1.7.4"]
# ///

from common import ASK, MODEL, SCHEMA, V1
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


def model(**more):
    return ChatOpenAI(
        base_url=V1, api_key="none", model=MODEL, max_tokens=60, temperature=0, max_retries=0, timeout=300, **more
    )


@tool
def look(city: str) -> str:
    "Looks at a city."
    return "sunny"


def use_invoke():
    assert model().invoke(ASK).content


def use_stream():
    assert "".join(chunk.content for chunk in model(stream_usage=True).stream(ASK))


def use_bind_tools():
    for choice in ("auto", "any", "look"):
        model().bind_tools([look], tool_choice=choice).invoke(ASK)


def use_json_schema():
    assert "city" in model().with_structured_output({**SCHEMA, "title": "x"}, method="json_schema").invoke(ASK)


def use_function_calling():
    assert "city" in model().with_structured_output({**SCHEMA, "title": "x"}, method="function_calling").invoke(ASK)


def use_history():
    call = AIMessage("", tool_calls=[{"name": "look", "args": {"city": "Paris"}, "id": "a"}])
    model().bind_tools([look]).invoke([HumanMessage(ASK), call, ToolMessage("sunny", tool_call_id="a")])


def use_responses_api():
    assert model(use_responses_api=True).invoke(ASK).content


def use_reasoning_effort():
    model(reasoning_effort="low").invoke(ASK)
