"""The fields that ask for structured output: what reaches the engine, and every 400."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.structured import (
    any_grammar,
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)
from tests.server.byte_tokenizer import IM_END, sentencepiece_tokenizer
from tests.server.http_client import app_of, chat, complete, error_of
from tests.server.scripted_client import FakeEngine, saying

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OBJECT = {"type": "object"}
GBNF = 'root ::= "a" | "b"'


def asked(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, **more}}


def grammar_sent(send: Any = chat, **fields: Any) -> str:
    engine = FakeEngine(saying("x"))
    answer = send(app_of(engine), **fields)
    assert answer.status_code == 200, answer.text
    return engine.requests[0].grammar


ASKS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "text"}}, ""),
    ({"response_format": None}, ""),
    ({"response_format": {"type": "json_object"}}, json_schema_grammar(OBJECT)),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, json_schema_grammar(SCHEMA)),
    ({"response_format": asked(name="out", strict=True)}, json_schema_grammar(SCHEMA)),
    ({"response_format": asked(name="out", strict=False)}, json_schema_grammar(SCHEMA)),
    ({"response_format": asked(name=None, strict=None)}, json_schema_grammar(SCHEMA)),
    ({"response_format": asked()}, json_schema_grammar(SCHEMA)),
    ({"structured_outputs": {}}, ""),
    ({"structured_outputs": {"json": SCHEMA}}, json_schema_grammar(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json_schema_grammar(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, json_schema_grammar(OBJECT)),
    ({"structured_outputs": {"json_object": False, "regex": "a+"}}, regex_grammar("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, choice_grammar(["a", "b"])),
    ({"structured_outputs": {"grammar": GBNF}}, any_grammar(GBNF)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        json_schema_grammar(SCHEMA, compact=True),
    ),
    ({"guided_json": SCHEMA}, json_schema_grammar(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, json_schema_grammar(SCHEMA)),
    ({"guided_json": {}}, json_schema_grammar({})),
    ({"guided_regex": "a+"}, regex_grammar("a+")),
    ({"guided_choice": ["a", "b"]}, choice_grammar(["a", "b"])),
    ({"guided_grammar": GBNF}, any_grammar(GBNF)),
    ({"guided_json": "", "guided_regex": "", "guided_grammar": "", "grammar": ""}, ""),
    ({"grammar": GBNF}, any_grammar(GBNF)),
    ({"json_schema": SCHEMA}, json_schema_grammar(SCHEMA)),
    ({"guided_regex": "a+", "response_format": {"type": "text"}}, regex_grammar("a+")),
]


@pytest.mark.parametrize(("fields", "grammar"), ASKS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("send", [chat, complete])
def test_every_way_of_asking_reaches_the_engine(
    send: Any, fields: dict[str, Any], grammar: str
) -> None:
    assert grammar_sent(send, **fields) == grammar


BAD_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "not-a-type"}, "Invalid type: not-a-type"),
    ({"type": 5}, "type must be"),
    ({"properties": []}, "properties must be an object"),
    ({"$ref": "#/$defs/missing"}, "'/$defs/missing' does not exist"),
    ({"$ref": "https://example.invalid/s.json"}, "nothing is fetched"),
    ({"type": "string", "pattern": "([a-z"}, "unclosed character class"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems (3) is greater"),
    ({"enum": []}, "'enum' is empty"),
    ({"$ref": "#"}, "without ever coming to an end"),
    ({"$defs": {"N": {"$ref": "#/$defs/N"}}, "$ref": "#/$defs/N"}, "at '/$defs/N'"),
    ({"properties": {"x": {"type": "array", "uniqueItems": True}}}, "at '/properties/x'"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("schema", "reason"), BAD_SCHEMAS, ids=str)
def test_a_bad_schema_is_a_400_with_the_reason_before_any_stream(
    schema: Any, reason: str, stream: bool
) -> None:
    engine = FakeEngine(saying("x"))
    app = app_of(engine)
    answer = chat(app, response_format=asked(schema, name="out"), stream=stream)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "response_format"
    assert error_of(answer)["message"].startswith("Invalid schema in 'response_format'")
    assert reason in error_of(answer)["message"]
    assert engine.requests == []
    assert chat(app).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": asked([1])}, "response_format.json_schema.schema"),
        ({"guided_regex": "([a-z"}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_grammar": "root ::= root"}, "guided_grammar"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 1000}, "guided_json"),
        ({"guided_json": '"\\ud83d"'}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": {"type": "x"}}, "guided_json"),
        ({"json_schema": {"type": "x"}}, "json_schema"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {"x": 1}}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " *"}}, "structured_outputs"),
        ({"structured_outputs": {"disable_additional_properties": True}}, "structured_outputs"),
        ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
        ({"response_format": asked(), "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice"),
    ],
    ids=str,
)
@pytest.mark.parametrize("send", [chat, complete])
def test_what_cannot_be_done_is_a_400_that_names_the_field(
    send: Any, fields: dict[str, Any], param: str
) -> None:
    answer = send(app_of(FakeEngine(saying("x"))), **fields)
    assert answer.status_code == 400
    assert (error_of(answer)["param"] or "").partition("[")[0] == param.partition("[")[0]
    assert len(error_of(answer)["message"]) > 10


def test_with_a_grammar_the_models_end_tokens_are_not_ignored() -> None:
    engine = FakeEngine(saying("x"))
    chat(app_of(engine), guided_regex="a+", ignore_eos=True, max_tokens=3)
    chat(app_of(engine), ignore_eos=True, max_tokens=3)
    assert [IM_END in r.sampling.stop_token_ids for r in engine.requests] == [True, False]


@pytest.mark.parametrize(("pattern", "text"), [("  two", "  two"), (None, " two")])
def test_a_leading_space_that_was_asked_for_stays(pattern: str | None, text: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    two, space = 259, 260
    assert tokenizer.decode([space, two]) == "  two"
    engine = FakeEngine(lambda _: [space, two])
    fields = {} if pattern is None else {"guided_regex": pattern}
    answer = chat(app_of(engine, tokenizer=tokenizer), max_tokens=2, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == text


def test_all_choices_have_the_grammar() -> None:
    engine = FakeEngine(saying("x"))
    chat(app_of(engine), n=3, guided_choice=["a", "b"])
    assert {r.grammar for r in engine.requests} == {choice_grammar(["a", "b"])}
    assert len(engine.requests) == 3
