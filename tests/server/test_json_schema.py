"""What a schema becomes before it is compiled, and what is refused before that."""

from __future__ import annotations

import time
from typing import Any

import pytest

from server.json_schema import SchemaError, prepare_schema
from server.schema_tree import pointer, reference_path, subschemas, walk

TEXT = {"type": "string"}
NAMED = {"type": "object", "properties": {"a": TEXT}}


def refused(schema: Any) -> SchemaError:
    with pytest.raises(SchemaError) as error:
        prepare_schema(schema)
    return error.value


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"additionalProperties": False}


def test_objects_that_list_their_properties_are_closed_at_every_depth() -> None:
    schema = {"type": "array", "items": {"anyOf": [NAMED, {"$ref": "#/$defs/N"}]}}
    assert prepare_schema(schema | {"$defs": {"N": NAMED}}) == {
        "type": "array",
        "items": {"anyOf": [closed(NAMED), {"$ref": "#/$defs/N"}]},
        "$defs": {"N": closed(NAMED)},
    }


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": True},
        {"additionalProperties": TEXT},
        {"patternProperties": {"^x": TEXT}},
        {"minProperties": 2},
        {"required": ["b"]},
        {"required": "a"},
        {"properties": {}},
        {"properties": 5},
        {"allOf": [{"properties": {"b": TEXT}}]},
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ],
    ids=str,
)
def test_objects_that_speak_of_more_stay_open(more: dict[str, Any]) -> None:
    assert prepare_schema(NAMED | more) == NAMED | more


def test_objects_stay_open_in_a_schema_that_combines_schemas() -> None:
    schema = {
        "$defs": {"N": NAMED},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/N", "properties": {"b": TEXT}}},
    }
    assert prepare_schema(schema) == schema


def test_annotations_beside_a_reference_combine_nothing() -> None:
    reference = {"$ref": "#/$defs/N", "description": "d", "title": "t", "default": None}
    prepared = prepare_schema({"$defs": {"N": NAMED}, "anyOf": [reference, {"type": "null"}]})
    assert prepared["$defs"]["N"] == closed(NAMED)


@pytest.mark.parametrize(
    ("schema", "prepared"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": ["string"], "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        ({"anyOf": [TEXT], "nullable": True}, {"anyOf": [TEXT, {"type": "null"}]}),
        ({"enum": ["a", None], "nullable": True}, {"enum": ["a", None]}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "array", "uniqueItems": True}, {"type": "array", "uniqueItems": True}),
        ({"$schema": "https://json-schema.org/draft/2019-09/schema", **TEXT}, TEXT),
        ({"x-guidance": {"lenient": True}, **TEXT}, TEXT),
        ({"maximum": 2**60 + 300}, {"maximum": 2**60 + 300}),
        ({"maximum": 2**60 + 200}, {"maximum": 2**60}),
        ({"minimum": 2**60 + 1}, {"minimum": 2**60 + 256}),
        ({"minimum": -(2**60) - 200}, {"minimum": -(2**60)}),
        ({"exclusiveMaximum": 2**53 + 3}, {"exclusiveMaximum": 2**53 + 2}),
        ({"maximum": 20_000_000_000, "minimum": 0.5}, {"maximum": 20_000_000_000, "minimum": 0.5}),
        ({"maximum": 10**400}, {"maximum": 10**400}),
        ({"maximum": True}, {"maximum": True}),
    ],
    ids=str,
)
def test_parts_are_rewritten(schema: dict[str, Any], prepared: dict[str, Any]) -> None:
    assert prepare_schema(schema) == prepared


def test_a_nullable_reference_becomes_a_choice() -> None:
    schema = {"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": TEXT}}
    assert prepare_schema(schema) == {
        "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
        "$defs": {"a": TEXT},
    }


def test_a_property_may_be_called_like_a_keyword() -> None:
    names = ["nullable", "$schema", "enum", "default", "$defs", "allOf", "uniqueItems", "$ref"]
    schema = {"type": "object", "properties": dict.fromkeys(names, TEXT)}
    assert prepare_schema(schema) == closed(schema)


def test_the_clients_schema_is_not_changed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "nullable": True}}}
    before = repr(schema)
    prepare_schema(schema)
    assert repr(schema) == before


NODE = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}


def definitions(**schemas: Any) -> dict[str, Any]:
    return {"$defs": schemas, "$ref": "#/$defs/N"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, ""),
        (definitions(N={"$ref": "#/$defs/N"}), "/$defs/N"),
        (definitions(N={"$ref": "#/$defs/M"}, M={"$ref": "#/$defs/N"}), "/$defs/N"),
        (definitions(N={"anyOf": [{"$ref": "#/$defs/N"}]}), "/$defs/N"),
        (definitions(N={"allOf": [{"$ref": "#/$defs/N"}, TEXT]}), "/$defs/N"),
        (
            definitions(
                N={"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
            ),
            "/$defs/N",
        ),
        (
            definitions(
                N={
                    "type": "object",
                    "required": ["n"],
                    "additionalProperties": {"$ref": "#/$defs/N"},
                }
            ),
            "/$defs/N",
        ),
        (
            definitions(N={"type": "array", "items": {"$ref": "#/$defs/N"}, "minItems": 1}),
            "/$defs/N",
        ),
        (
            definitions(
                N={"type": "array", "prefixItems": [TEXT, {"$ref": "#/$defs/N"}], "minItems": 2}
            ),
            "/$defs/N",
        ),
        (
            {
                "type": "object",
                "properties": {"optional": {"$ref": "#/$defs/N"}},
                "$defs": {"N": {"$ref": "#/$defs/N"}},
            },
            "/$defs/N",
        ),
    ],
    ids=str,
)
def test_a_reference_without_an_end_is_refused_with_its_place(schema: Any, place: str) -> None:
    error = refused(schema)
    assert error.place == place
    assert "without ever coming to an end" in error.message


@pytest.mark.parametrize(
    "schema",
    [
        definitions(
            N={"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": []}
        ),
        definitions(N={"type": "array", "items": {"$ref": "#/$defs/N"}, "minItems": 0}),
        definitions(N={"type": "array", "prefixItems": [TEXT], "items": {"$ref": "#/$defs/N"},
                       "minItems": 1}),
        definitions(N={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/N"}]}),
        definitions(N={"type": ["object", "null"], "properties": {"n": {"$ref": "#/$defs/N"}},
                       "required": ["n"]}),
        definitions(N={"type": "object", "properties": {"m": {"$ref": "#/$defs/M"}},
                       "required": ["m"]},
                    M={"oneOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}),
        {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
         "required": ["kids"]},
        {"type": "object", "properties": {"default": {"$ref": "#/$defs/N"}},
         "required": ["default"], "$defs": {"N": TEXT, "unused": {"$ref": "#/$defs/unused"}}},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": TEXT}},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.invalid/s.json"},
        {"$ref": "#anchor"},
        {"$ref": 5},
        {"anyOf": 5, "allOf": "x", "properties": [], "items": 3, "required": 1, "minItems": "a"},
    ],
    ids=str,
)  # fmt: skip
def test_references_that_end_and_those_that_are_the_compilers_to_refuse_pass(schema: Any) -> None:
    prepare_schema(schema)


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"properties": {"x": {"enum": []}}}, "/properties/x", "'enum' is empty"),
        ({"items": {"type": "object", "properties": dict.fromkeys(map(str, range(501)), TEXT)}},
         "/items", "at most 500 in an object"),
        ({"anyOf": [{"properties": dict.fromkeys(map(str, range(500)), TEXT)}] * 11},
         "/anyOf/10", "5000 in all"),
        ({"type": "integer", "multipleOf": 99991}, "", "10,000"),
        ({"type": "number", "multipleOf": 9999.99}, "", "10,000"),
        ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, "/allOf/1", "10,000"),
    ],
    ids=range(6),
)  # fmt: skip
def test_what_would_take_too_long_is_refused(schema: Any, place: str, reason: str) -> None:
    error = refused(schema)
    assert error.place == place
    assert reason in error.message


@pytest.mark.parametrize("multiple", [0.01, 2.5, 1000, 1e-7, 10**9, 7])
def test_usual_multiples_are_allowed(multiple: float) -> None:
    prepare_schema({"type": "number", "multipleOf": multiple})


def test_long_chains_of_definitions_are_quick() -> None:
    count = 2000
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": TEXT}}
    start_s = time.perf_counter()
    prepare_schema(schema)
    refused({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"$ref": "#/$defs/d0"}}})
    assert time.perf_counter() - start_s < 1


def test_places_are_json_pointers() -> None:
    assert pointer(("properties", "a/b~c", "0")) == "/properties/a~1b~0c/0"
    assert pointer(()) == ""
    assert reference_path("#/properties/a~1b~0c/0") == ("properties", "a/b~c", "0")
    assert reference_path("#") == ()


def test_schemas_are_found_where_keywords_hold_them_and_nowhere_else() -> None:
    schema = {
        "properties": {"p": TEXT},
        "enum": [{"type": "x"}],
        "default": {"properties": {"q": 1}},
        "items": [True, TEXT],
        "$defs": {"d": {"not": TEXT}},
    }
    assert [path for path, _ in subschemas(schema)] == [
        ("$defs", "d"),
        ("properties", "p"),
        ("items", "0"),
        ("items", "1"),
    ]
    assert [pointer(path) for path, _ in walk(schema)] == [
        "",
        "/$defs/d",
        "/$defs/d/not",
        "/properties/p",
        "/items/1",
    ]
