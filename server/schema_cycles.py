"""Finds the references of a JSON Schema that lead back to themselves without an end in sight.

A schema is *finite* if some document of finite length matches it: `{"$ref": "#"}` is not, and
neither is an object that requires a property like itself. The finite schemas are the least fixed
point of that rule (the productive symbols of a grammar, Hopcroft and Ullman 1979, lemma 4.1).

What cannot be read here counts as finite: whether it is right is the compiler's to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from server.schema_tree import DEFINITIONS, Path, find, reference_path, subschemas


def find_endless(root: Any) -> Path | None:
    """The path of a schema that is in use and not finite; None if all of them are."""
    targets: dict[str, Any] = {}
    users: dict[str, set[str]] = defaultdict(set)
    pending = ["#"]
    while pending:
        reference = pending.pop()
        if reference not in targets:
            targets[reference] = find(root, reference_path(reference))
            for used in _references(targets[reference]):
                users[used].add(reference)
                pending.append(used)
    finite: set[str] = set()
    pending = list(targets)
    while pending:
        reference = pending.pop()
        if reference not in finite and _is_finite(targets[reference], finite):
            finite.add(reference)
            pending += users[reference]
    endless = [reference for reference in targets if reference not in finite]
    # The root may only be endless because of what it refers to, so it is named last.
    endless.sort(key=lambda reference: reference == "#")
    return reference_path(endless[0]) if endless else None


def _references(schema: Any) -> Iterator[str]:
    """Every local reference in a schema, but not those in its definitions."""
    reference = _local_reference(schema)
    if reference is not None:
        yield reference
    for path, inner in subschemas(schema):
        if path[0] not in DEFINITIONS:
            yield from _references(inner)


def _local_reference(schema: Any) -> str | None:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    is_local = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    return reference if is_local else None


def _is_finite(schema: Any, finite: set[str]) -> bool:
    if not isinstance(schema, dict):
        return True
    reference = _local_reference(schema)
    if reference is not None and reference not in finite:
        return False
    for keyword, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(keyword) or [True]
        if isinstance(parts, list) and not enough(_is_finite(part, finite) for part in parts):
            return False
    kinds = schema.get("type")
    if kinds in ("object", ["object"]):
        return all(_is_finite(item, finite) for item in _needed_properties(schema))
    if kinds in ("array", ["array"]):
        return all(_is_finite(item, finite) for item in _needed_items(schema))
    return True


def _needed_properties(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the properties that every such object has."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(required, list):
        return []
    known = properties if isinstance(properties, dict) else {}
    others = schema.get("additionalProperties", True)
    return [known.get(name, others) for name in required if isinstance(name, str)]


def _needed_items(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the items that every such array has."""
    num_items, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    if not isinstance(num_items, int | float) or not isinstance(first, list):
        return []
    rest = [schema.get("items", True)] if num_items > len(first) else []
    return [*first[: int(num_items)], *rest]
