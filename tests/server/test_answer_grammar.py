"""Structured output together with a thought and with tools: one grammar for the whole answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.grammar_matcher import GrammarFactory
from server.output_format import OutputFormat
from tests.server.byte_tokenizer import CHATML, IM_END, VOCAB_SIZE, byte_tokenizer_json
from tests.server.http_client import app_of, chat, error_of
from tests.server.scripted_client import INFO, FakeEngine, saying

FACTORY = GrammarFactory(byte_tokenizer_json, [IM_END], VOCAB_SIZE)
THINKS = OutputFormat(reasons=True)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRUCTURED = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
DOCUMENT = '{"a": 1}'
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def grammar_of(model: dict[str, Any], fields: dict[str, Any]) -> str:
    engine = FakeEngine(saying("x"))
    engine.info = replace(INFO, max_model_len=4_096)
    answer = chat(app_of(engine, max_model_len=4_096, **model), **fields)
    assert answer.status_code == 200, answer.text
    return engine.requests[0].grammar


def matches(grammar: str, text: str) -> bool:
    tokens = [*text.encode(), IM_END]
    return FACTORY.create(grammar).num_allowed(tokens) == len(tokens)


def matching(grammar: str, *texts: str) -> list[str]:
    return [text for text in texts if matches(grammar, text)]


def test_a_reasoning_model_may_think_first() -> None:
    grammar = grammar_of({"output_format": THINKS}, STRUCTURED)
    thought = f"<think>hm {{</think>\n\n{DOCUMENT}"
    assert matching(grammar, DOCUMENT, thought, "hm", "<think>hm</think>no") == [DOCUMENT, thought]


def test_a_thought_that_the_prompt_has_begun_must_end_first() -> None:
    template = CHATML.replace("assistant\n", "assistant\n<think>\n")
    grammar = grammar_of({"output_format": THINKS, "template": template}, STRUCTURED)
    thought = f"hm</think>\n\n{DOCUMENT}"
    assert matching(grammar, DOCUMENT, thought) == [thought]


@pytest.mark.parametrize("parallel", [True, False])
def test_tools_that_may_be_called_stand_beside_the_document(parallel: bool) -> None:
    grammar = grammar_of({}, STRUCTURED | {"tools": TOOLS, "parallel_tool_calls": parallel})
    assert matching(grammar, DOCUMENT, CALL, "hm", f"{DOCUMENT}{CALL}") == [DOCUMENT, CALL]


def test_tools_that_must_be_called_take_the_documents_place() -> None:
    grammar = grammar_of({}, STRUCTURED | {"tools": TOOLS, "tool_choice": "required"})
    assert matching(grammar, DOCUMENT, CALL) == [CALL]


def test_tools_that_must_not_be_called_leave_the_document_alone() -> None:
    grammar = grammar_of({}, STRUCTURED | {"tools": TOOLS, "tool_choice": "none"})
    assert matching(grammar, DOCUMENT, CALL) == [DOCUMENT]


def test_a_thought_goes_before_calls_and_documents() -> None:
    grammar = grammar_of({"output_format": THINKS}, STRUCTURED | {"tools": TOOLS})
    texts = [f"<think>x</think>\n\n{answer}" for answer in (DOCUMENT, CALL)]
    assert matching(grammar, *texts, "<think>x</think>\n\nhm") == texts


def test_every_kind_of_constraint_can_follow_a_thought() -> None:
    asks: list[tuple[dict[str, Any], str]] = [
        ({"guided_choice": ["yes", "no"]}, "no"),
        ({"guided_regex": "[0-9]+"}, "42"),
        ({"guided_grammar": 'root ::= x\nx ::= "y"'}, "y"),
    ]
    for fields, text in asks:
        grammar = grammar_of({"output_format": THINKS}, fields)
        assert matches(grammar, f"<think>hm</think>\n{text}")


def test_a_bad_schema_is_refused_also_where_tools_take_its_place() -> None:
    fields: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}},
        "tools": TOOLS,
        "tool_choice": "required",
    }
    answer = chat(app_of(FakeEngine(saying("x")), max_model_len=4_096), **fields)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "response_format")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "oops"}}}, "Invalid type: oops"),
        ({"type": "object", "properties": {"a": {"pattern": "(", "type": "string"}}}, "regex"),
    ],
)
def test_tools_that_cannot_be_enforced_are_refused(parameters: Any, reason: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    app = app_of(FakeEngine(saying("x")), max_model_len=4_096)
    answer = chat(app, tools=tools, tool_choice="required")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "tools"
    assert reason in error_of(answer)["message"]
