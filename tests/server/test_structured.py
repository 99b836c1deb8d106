"""Grammar texts from schemas, regexes, choices and grammars, over a vocabulary of bytes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.grammar import GrammarError
from engine.grammar_matcher import GrammarFactory
from server.limits import MAX_GRAMMAR_CHARS
from server.structured import (
    StructuredError,
    any_grammar,
    check_grammar,
    choice_grammar,
    embedded,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from tests.server.byte_tokenizer import IM_END, VOCAB_SIZE, byte_tokenizer_json

FACTORY = GrammarFactory(byte_tokenizer_json, [IM_END], VOCAB_SIZE)
AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}


def matches(grammar: str, text: str) -> bool:
    """Whether `text` is a whole output."""
    subject, tokens = FACTORY.create(grammar), [*text.encode(), IM_END]
    return subject.num_allowed(tokens) == len(tokens)


def refused(schema: Any) -> StructuredError:
    with pytest.raises(StructuredError) as error:
        check_grammar(json_schema_grammar(schema), FACTORY, schema)
    return error.value


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a": 1, "b": true}', True),
        ('{"a":1,"b":true}', True),
        ('{"a": 1}', True),
        ("{}", True),
        ('{ "a": 1}', False),
        ('{"a":  1}', False),
        ('{"a": 1 }', False),
        ('{"a": 1,\n"b": true}', False),
        ('\n{"a": 1}', False),
        ('{"b": true, "a": 1}', False),
        ('{"a": 1, "c": 2}', False),
    ],
)
def test_json_has_one_optional_space_and_the_schemas_order(text: str, is_allowed: bool) -> None:
    assert matches(json_schema_grammar(AB), text) is is_allowed


def test_compact_json_has_no_space() -> None:
    grammar = json_schema_grammar(AB, compact=True)
    assert matches(grammar, '{"a":1,"b":true}')
    assert not matches(grammar, '{"a": 1}')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object"}, '{"x": [1, {"y": null}]}', "[]"),
        ({}, "[1, null]", "x"),
        ({"type": "string", "nullable": True}, "null", "1"),
        ({"type": ["integer", "null"]}, "null", '"a"'),
        ({"const": {"a": [1, "é"]}}, '{"a": [1, "é"]}', '{"a": [1]}'),
        ({"type": "string", "format": "date"}, '"2024-02-03"', '"today"'),
        ({"type": "string", "minLength": 2, "maxLength": 3}, '"é😀a"', '"a"'),
        ({"type": "string"}, '"\\n\\"\\\\"', '"a\n"'),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"x": 1}', '{"x": ""}'),
        ({"$ref": "#/definitions/d", "definitions": {"d": {"enum": [1]}}}, "1", "2"),
        (
            {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}],
             "type": "object"},
            '{"a": 1}',
            "{}",
        ),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, '"a"', "null"),
    ],
    ids=str,
)  # fmt: skip
def test_schemas_hold(schema: dict[str, Any], good: str, bad: str) -> None:
    grammar = json_schema_grammar(schema)
    assert matches(grammar, good)
    assert not matches(grammar, bad)


@pytest.mark.parametrize(
    ("schema", "reason", "place"),
    [
        ({"type": "not-a-type"}, "Invalid type: not-a-type", ""),
        ({"type": 5}, "type must be a string or array of strings", ""),
        ({"properties": []}, "properties must be an object", ""),
        ({"$ref": "#/$defs/missing"}, "Pointer '/$defs/missing' does not exist", ""),
        ({"items": {"$ref": "https://example.invalid/s.json"}}, "nothing is fetched", "/items"),
        ({"type": "string", "pattern": "([a-z"}, "unclosed character class", ""),
        ({"items": {"type": "string", "pattern": "(?=x)"}}, "look-around", "/items"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems (3) is greater", ""),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3) is greater", ""),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater", ""),
        ({"type": "integer", "minimum": 10**300}, "integer range", ""),
        ({"minimum": "3"}, "Expected a number for 'minimum'", ""),
        ({"enum": []}, "'enum' is empty", ""),
        ({"type": "array", "uniqueItems": True}, 'not supported: "uniqueItems"', ""),
        ({"anyOf": [{"not": {}}, {"type": "null"}]}, 'not supported: "not"', "/anyOf/0"),
        ({"if": {}, "then": {}}, 'not supported: "if", "then"', ""),
        ({"type": "string", "format": "colour"}, "Unknown format: colour", ""),
        ({"oneOf": [{"type": "string"}, {"maxLength": 2}]}, "use 'anyOf'", ""),
        (
            {"type": "object", "properties": {"é/": {"$ref": "#/$defs/X"}},
             "$defs": {"Y": {}, "X": {"properties": {"q": {"type": "strng"}}}}},
            "Invalid type: strng",
            "/$defs/X/properties/q",
        ),
        ({"properties": {"a": 5}}, "schema must be an object or boolean", "/properties/a"),
        ([], "the schema must be an object", ""),
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_that_cannot_be_enforced_is_refused_with_reason_and_place(
    schema: Any, reason: str, place: str
) -> None:
    start_s = time.perf_counter()
    error = refused(schema)
    assert reason in error.message
    assert error.place == place
    assert "\n" not in error.message
    assert time.perf_counter() - start_s < 1


def test_the_place_in_a_large_schema_is_given_up_in_time() -> None:
    wide = {f"p{i}": {"anyOf": [{"type": "string"}] * 12} for i in range(400)}
    schema = {"type": "object", "properties": {**wide, "z": {"type": "oops"}}}
    start_s = time.perf_counter()
    assert "Invalid type: oops" in refused(schema).message
    assert time.perf_counter() - start_s < 2


def test_leniency_cannot_be_asked_for() -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    assert "uniqueItems" in refused(schema).message
    draft_7 = {"$schema": "http://json-schema.org/draft-07/schema#", "dependentRequired": {}}
    assert "dependentRequired" in refused(draft_7).message


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a|bc", "bc", "b"),
        ("^ab$", "ab", "aab"),
        (r"\d{2}", "12", "1"),
        ("a/b", "a/b", "ab"),
        ("a\nb", "a\nb", "ab"),
        ("[é-ü]+😀", "éü😀", "e😀"),
        ("(?i)yes", "YeS", "no"),
        ("", "", "a"),
    ],
)
def test_a_regex_matches_the_whole_output(pattern: str, good: str, bad: str) -> None:
    grammar = regex_grammar(pattern)
    assert matches(grammar, good)
    assert not matches(grammar, bad)


@pytest.mark.parametrize("pattern", [r"\d", r"[\d]"])
def test_digits_of_other_scripts_are_no_digits(pattern: str) -> None:
    assert not matches(regex_grammar(pattern), "٣")
    assert not matches(json_schema_grammar({"type": "string", "pattern": f"^{pattern}$"}), '"٣"')


CHOICES = ["東京", "é", "😀", "a\u2028b", '"q\\', "\x01", "a\nb", "", "</s>", "<|im_end|>", "$x"]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_taken_to_the_letter(choice: str) -> None:
    grammar = choice_grammar(CHOICES)
    assert matches(grammar, choice)
    assert not matches(grammar, choice + "x")


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= "yes" | "no"', "no", "maybe"),
        ('root ::= item+\nitem ::= "a" [0-9]{2}', "a12a34", "a1"),
        ('root ::= "é😀\\n" [^"\\\\]', "é😀\nx", 'é😀\n"'),
        ('start: "yes" | "no"', "yes", "maybe"),
        ('?start: value\nvalue: /[ab]+/ ";"', "ab;", "c;"),
        ('start: "::=" | x\nx: "y"', "::=", "root"),
    ],
)
def test_grammars_are_lark_or_gbnf(text: str, good: str, bad: str) -> None:
    grammar = any_grammar(text)
    assert matches(grammar, good)
    assert not matches(grammar, bad)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= root", "matches no text at all"),
        ("start: a\na: a", "matches no text at all"),
        ("root ::= (", "Expected ')'"),
        ("root ::= [a-z", "Unexpected end of input"),
        ("root ::= other", "other"),
        ('x ::= "a"', "root"),
        ("root ::= " + "(" * 5000, "nested too deeply"),
        ("start: missing", "unknown name"),
        ('{"grammars": []}', "expecting rule"),
        (" \n", "empty"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(StructuredError, match="(?s).*") as error:
        check_grammar(any_grammar(text), FACTORY)
    assert reason in error.value.message


@pytest.mark.parametrize("build", [regex_grammar, any_grammar, lark_grammar])
def test_a_text_that_is_too_long_is_refused(build: Any) -> None:
    with pytest.raises(StructuredError, match="131,073 characters"):
        build("a" * (MAX_GRAMMAR_CHARS + 1))


def test_choices_and_schemas_have_the_same_limit() -> None:
    with pytest.raises(StructuredError, match="at most 131,072"):
        choice_grammar(["abcdefgh" * 64] * 300)
    with pytest.raises(StructuredError, match="at most 131,072"):
        json_schema_grammar({"enum": ["abcdefgh" * 64] * 300})
    with pytest.raises(StructuredError, match="no choice"):
        choice_grammar([])


def test_a_grammar_can_stand_in_another() -> None:
    for inner, text in [
        (json_schema_grammar(AB), '{"a": 1}'),
        (regex_grammar("[0-9]+"), "42"),
        (any_grammar('start: x\nx: "y"'), "y"),
    ]:
        grammar = embedded('start: "<" thought ">" @structured\nthought: /[^>]*/', inner)
        check_grammar(grammar, FACTORY)
        assert matches(grammar, f"<hm>{text}")
        assert not matches(grammar, text)


def test_what_cannot_be_compiled_never_gives_a_grammar() -> None:
    for text in ("", " "):
        with pytest.raises(StructuredError):
            lark_grammar(text)
    with pytest.raises(GrammarError):
        FACTORY.create(json.dumps({"grammars": []}))
