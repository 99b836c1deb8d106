"""A schema in the prompt: where it stands, when it is told, and when not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.schema_prompt import with_schema
from tests.server.byte_tokenizer import IM_END, IM_START
from tests.server.http_client import HI, app_of, chat
from tests.server.scripted_client import FakeEngine, saying

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
DESCRIBED = {"description": "How large.", **SCHEMA}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
USER: dict[str, Any] = {"role": "user", "content": "How large?"}
CALL: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
RESULT: dict[str, Any] = {"role": "tool", "content": "3"}


def asked(**fields: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "size", "schema": SCHEMA, **fields},
    }


def prompt_of(schema_in_prompt: bool = True, **fields: Any) -> str:
    engine = FakeEngine(saying('{"größe":1}'))
    engine.info = None
    app = app_of(engine, schema_in_prompt=schema_in_prompt, max_model_len=1_000)
    response = chat(app, **fields)
    assert response.status_code == 200, response.text
    ids = engine.requests[0].prompt_token_ids
    return bytes(i for i in ids if i not in (IM_START, IM_END)).decode()


def test_it_ends_the_last_message_of_the_user_and_changes_no_other() -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": "Very."}, USER, CALL, RESULT]
    told = with_schema(messages, SCHEMA)
    assert told[:3] + told[4:] == messages[:3] + messages[4:]
    before, _, schema = told[3]["content"].rpartition("\n")
    assert before.startswith("How large?\n\n")
    assert json.loads(schema) == SCHEMA
    assert "größe" in schema
    assert messages[3] == USER


def test_without_a_message_of_the_user_it_is_a_system_message() -> None:
    told = with_schema([SYSTEM], SCHEMA)
    assert [message["role"] for message in told] == ["system", "system"]
    assert json.dumps(SCHEMA, ensure_ascii=False) in told[0]["content"]


@pytest.mark.parametrize(
    ("fields", "schema"),
    [({}, SCHEMA), ({"strict": False}, SCHEMA), ({"description": "How large."}, DESCRIBED)],
    ids=str,
)
def test_the_schema_of_a_response_format_is_told(
    fields: dict[str, Any], schema: dict[str, Any]
) -> None:
    assert json.dumps(schema, ensure_ascii=False) in prompt_of(response_format=asked(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"response_format": asked(), "schema_in_prompt": False},
    ],
    ids=str,
)
def test_nothing_else_changes_the_prompt(fields: dict[str, Any]) -> None:
    assert "größe" not in prompt_of(**fields)


def test_calls_that_must_come_are_the_answer_so_no_schema_is_told() -> None:
    def prompt(choice: str) -> str:
        return prompt_of(response_format=asked(), tools=TOOLS, tool_choice=choice)

    assert "größe" in prompt("auto")
    assert "größe" not in prompt("required")


def test_a_schema_never_makes_a_conversation_too_long() -> None:
    talk = [{"role": "user", "content": "x" * 900}]
    assert "größe" not in prompt_of(response_format=asked(), messages=talk)
    assert "größe" in prompt_of(response_format=asked(), messages=HI)
