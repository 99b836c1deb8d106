"""A client's JSON Schema, made ready for the grammar compiler.

What is changed, so that a small model writes what people mean and every output still validates:
- an object that lists `properties` and does not speak of further ones is closed; but not in a
  schema that combines schemas (`allOf`, or conditions beside a `$ref`, `anyOf` or `oneOf`), where
  closing a part could close the whole;
- `nullable` (OpenAPI 3.0) becomes a type; `uniqueItems: false`, which asks for nothing, goes;
- an integer bound that no double holds moves inwards to one that does;
- `$schema` and `x-guidance` go: the keywords of all drafts are known, and nothing is lenient.

What is refused here, since the compiler would accept it and then fail or take too long: references
without an end in sight, and sizes beyond the limits; and an empty enum, which it does not name.
Everything else is the compiler's to refuse.
Knows no request and no grammar.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from server.limits import MAX_MULTIPLE_OF, MAX_OBJECT_PROPERTIES, MAX_SCHEMA_PROPERTIES
from server.schema_cycles import find_endless
from server.schema_tree import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, SCHEMAS, Path, pointer, walk

_COMBINING = {"$ref", "anyOf", "oneOf", "allOf"}
_ANNOTATIONS = {
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "id",
    "nullable",
    "readOnly",
    "title",
    "writeOnly",
}
_SPEAKS_OF_FURTHER_PROPERTIES = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "minProperties",
    "maxProperties",
}
_INWARDS = {
    "minimum": math.inf,
    "exclusiveMinimum": math.inf,
    "maximum": -math.inf,
    "exclusiveMaximum": -math.inf,
}


class SchemaError(ValueError):
    """A schema that is not enforced. `place` is a JSON pointer to the part that is meant."""

    def __init__(self, message: str, path: Path = ()) -> None:
        super().__init__(message)
        self.message = message
        self.place = pointer(path)


def prepare_schema(schema: Any) -> Any:
    """The schema to compile. Raises SchemaError."""
    combines = _combines(schema)
    _check(schema, combines)
    prepared = _prepare(schema, closes=not combines)
    endless = find_endless(prepared)
    if endless is not None:
        raise SchemaError("it refers to itself without ever coming to an end", endless)
    return prepared


def _check(schema: Any, combines: bool) -> None:
    num_properties = multiple_sum = 0
    multiple_product = 1
    for path, node in walk(schema):
        properties = node.get("properties")
        num_here = len(properties) if isinstance(properties, dict) else 0
        num_properties += num_here
        if num_here > MAX_OBJECT_PROPERTIES or num_properties > MAX_SCHEMA_PROPERTIES:
            raise SchemaError(
                f"it lists too many properties: at most {MAX_OBJECT_PROPERTIES} in an object and "
                f"{MAX_SCHEMA_PROPERTIES} in all are allowed",
                path,
            )
        if node.get("enum") == []:
            raise SchemaError("'enum' is empty, so nothing can match it", path)
        multiple_sum += _multiple_of(node)
        multiple_product *= max(1, _multiple_of(node))
        largest = multiple_product if combines else multiple_sum
        if largest > MAX_MULTIPLE_OF:
            raise SchemaError(
                f"'multipleOf' is too large to be enforced: its digits, of all of them together, "
                f"may make {MAX_MULTIPLE_OF:,}",
                path,
            )


def _multiple_of(node: dict[str, Any]) -> int:
    """The digits of `multipleOf` as a whole number: 25 for 2.5 and for 2500.

    It is the number of states of the automaton that counts remainders.
    """
    value = node.get("multipleOf", 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))


def _combines(schema: Any) -> bool:
    return any(
        "allOf" in node or (_COMBINING & node.keys() and len(node.keys() - _ANNOTATIONS) > 1)
        for _, node in walk(schema)
    )


def _prepare(node: Any, *, closes: bool) -> Any:
    if not isinstance(node, dict):
        return node
    prepared = {key: _prepare_value(key, value, closes) for key, value in node.items()}
    for key in ("$schema", "x-guidance"):
        prepared.pop(key, None)
    if prepared.get("uniqueItems") is False:
        del prepared["uniqueItems"]
    if prepared.pop("nullable", None) is True:
        prepared = _with_null(prepared)
    if closes and _is_to_be_closed(prepared):
        prepared["additionalProperties"] = False
    return prepared


def _prepare_value(key: str, value: Any, closes: bool) -> Any:
    if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
        return {name: _prepare(item, closes=closes) for name, item in value.items()}
    if key in LISTS_OF_SCHEMAS and isinstance(value, list):
        return [_prepare(item, closes=closes) for item in value]
    if key in SCHEMAS:
        return _prepare(value, closes=closes)
    if key in _INWARDS and isinstance(value, int) and not isinstance(value, bool):
        return _representable(value, _INWARDS[key])
    return value


def _is_to_be_closed(node: dict[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    if _SPEAKS_OF_FURTHER_PROPERTIES & node.keys():
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _with_null(node: dict[str, Any]) -> dict[str, Any]:
    null = {"type": "null"}
    kinds = node.get("type")
    if isinstance(kinds, str | list):
        return node | {"type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}
    if isinstance(node.get("anyOf"), list):
        return node | {"anyOf": [*node["anyOf"], null]}
    if "$ref" in node:
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return rest | {"anyOf": [{"$ref": node["$ref"]}, null]}
    return node


def _representable(bound: int, inwards: float) -> int:
    """`bound` or the nearest whole double inside of it: the compiler reads bounds as doubles."""
    try:
        nearest = float(bound)
        is_outside = nearest < bound if inwards > 0 else nearest > bound
        return int(math.nextafter(nearest, inwards)) if is_outside else bound
    except OverflowError:  # beyond all doubles; the compiler refuses it
        return bound
