"""The shape of a JSON Schema: where schemas stand inside schemas, and how places are named.

Knows which keywords hold schemas; not what any keyword means. Malformed parts are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Path = tuple[str, ...]

DEFINITIONS = ("$defs", "definitions")

MAPS_OF_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", *DEFINITIONS}
LISTS_OF_SCHEMAS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
SCHEMAS = {
    "items",
    "additionalItems",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
}


def subschemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas directly inside `schema` with the path to each, definitions first."""
    if not isinstance(schema, dict):
        return
    for key in sorted(schema, key=lambda key: key not in DEFINITIONS):
        value = schema[key]
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            for name, item in value.items():
                yield (key, name), item
        elif key in LISTS_OF_SCHEMAS and isinstance(value, list):
            for index, item in enumerate(value):
                yield (key, str(index)), item
        elif key in SCHEMAS:
            yield (key,), value


def walk(schema: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """All schemas that are objects, the outer before the inner."""
    if isinstance(schema, dict):
        yield path, schema
        for step, inner in subschemas(schema):
            yield from walk(inner, path + step)


def pointer(path: Path) -> str:
    """A JSON pointer (RFC 6901); empty for the root."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)


def reference_path(reference: str) -> Path:
    """Where a local `$ref` (`#` or `#/…`) leads."""
    parts = unquote(reference).removeprefix("#").split("/")[1:]
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def find(schema: Any, path: Path) -> Any:
    """What stands at `path`; True, which is a schema that allows everything, if nothing does."""
    node = schema
    for part in path:
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            return True
    return node
