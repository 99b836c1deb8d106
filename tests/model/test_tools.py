"""Enforced calls of the real small model over HTTP: they parse and validate whatever it thinks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from engine.bundle import Bundle
from tests.model.test_responses import app_serving
from tests.server.http_client import listening

pytestmark = pytest.mark.model
SEEDS = range(5)
QUESTION: Any = [{"role": "user", "content": "What time is it in Oslo?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time in a zone.",
            "parameters": {
                "type": "object",
                "properties": {
                    "zone": {"type": "string", "maxLength": 20},
                    "format": {"type": "string", "enum": ["12h", "24h"]},
                },
                "required": ["zone"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
            },
        },
    },
]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client(real_bundle: Bundle) -> Iterator[openai.OpenAI]:
    with (
        listening(app_serving(real_bundle)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="smollm2", messages=QUESTION, tools=TOOLS, max_tokens=100, **fields
    )


def check_arguments(name: str, text: str) -> None:
    arguments = json.loads(text)
    if name == "get_time":
        assert arguments.keys() <= {"zone", "format"}
        assert len(arguments["zone"]) <= 20
        assert arguments.get("format", "24h") in ("12h", "24h")
    else:
        assert arguments.keys() == {"city", "days"}
        assert len(arguments["city"]) <= 20
        assert arguments["days"] in range(1, 10)


@pytest.mark.case("TO-02")
@pytest.mark.parametrize("seed", SEEDS)
def test_required_is_a_call_whose_arguments_validate(client: openai.OpenAI, seed: int) -> None:
    answer = ask(client, tool_choice="required", seed=seed, parallel_tool_calls=False)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    check_arguments(call.function.name, call.function.arguments)


@pytest.mark.case("TO-02")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_named_function_is_called_against_the_question(client: openai.OpenAI, seed: int) -> None:
    answer = ask(client, tool_choice=WEATHER, seed=seed)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    check_arguments("get_weather", call.function.arguments)


@pytest.mark.case("TO-05")
def test_streamed_arguments_are_the_whole_ones(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": WEATHER, "seed": 7}
    (call,) = ask(client, **fields).choices[0].message.tool_calls
    chunks = [c.choices[0].delta for c in ask(client, **fields, stream=True)]
    pieces = [piece.function.arguments for d in chunks for piece in d.tool_calls or []]
    assert len(pieces) > 3
    assert "".join(pieces) == call.function.arguments


@pytest.mark.case("TO-01")
def test_none_is_never_a_call(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice="none", temperature=0).choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
