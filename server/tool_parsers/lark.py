"""Pieces of Lark grammar for enforced calls: arguments as JSON, and property by property.

How their JSON is spaced and their schemas are made ready is told in `structured.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from server.errors import InvalidRequest
from server.structured import StructuredError, json_schema_grammar
from server.tool_parsers.family import Literal
from server.tools import FunctionTool

_BY_PROPERTY = {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions",
    "title", "description", "$schema", "$id", "$comment", "examples", "default", "strict",
}  # fmt: skip


def json_call(function: FunctionTool, literal: Literal, arguments_key: str) -> str:
    """`{"name": "f", "arguments": {…}}`."""
    head = f'{{"name": "{function.name}", "{arguments_key}": '
    return f"{literal(head)} %json {arguments_schema(function)} {literal('}')}"


def arguments_schema(function: FunctionTool) -> str:
    """The JSON text of the function's parameters as a grammar's schema."""
    return _embedded(dict(function.parameters), f"{function.where}.parameters")


def property_list(
    function: FunctionTool, write: Callable[[str, str], str], between: str = '", "'
) -> str:
    """All required properties, then any of the others, each as `write(name, expression)`.

    Raises InvalidRequest if the schema is more than a list of properties.
    """
    parameters = _checked(function)
    properties: Mapping[str, Any] = parameters.get("properties", {})
    required = [name for name in properties if name in parameters.get("required", ())]
    optional = [name for name in properties if name not in required]
    written = {
        name: f"({write(name, f'%json {property_schema(function, name)}')})" for name in properties
    }
    separator = f" {between} " if between else " "
    if required:
        rest = " ".join(f"({separator}{written[name]})?" for name in optional)
        return f"{separator.join(written[name] for name in required)} {rest}"
    return _any_of_in_order([written[name] for name in optional], separator) or '""'


def property_schema(function: FunctionTool, name: str) -> str:
    """The schema of one property, which may refer to the definitions of the whole."""
    parameters = function.parameters
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    schema = parameters["properties"][name]
    own = schema if isinstance(schema, dict) else {}
    return _embedded({**definitions, **own}, f"{function.where}.parameters.properties.{name}")


def _any_of_in_order(items: list[str], separator: str) -> str:
    """Expressions of which any may be left out; separated, and possibly none of them."""
    expression = ""
    for i in reversed(range(len(items))):
        rest = " ".join(f"({separator}{item})?" for item in items[i + 1 :])
        alternative = f"{items[i]} {rest}"
        expression = f"{alternative} | {expression}" if expression else alternative
    return f"({expression})?" if expression else ""


def _checked(function: FunctionTool) -> Mapping[str, Any]:
    parameters = function.parameters
    unknown = sorted(set(parameters) - _BY_PROPERTY)
    required = parameters.get("required", [])
    properties = parameters.get("properties", {})
    if unknown or not isinstance(properties, dict) or not set(required) <= set(properties):
        reason = f"the keyword '{unknown[0]}'" if unknown else "a required property without schema"
        raise InvalidRequest(
            f"'{function.where}.parameters' has {reason}, which cannot be enforced in the way "
            "this model writes its calls. Use tool_choice 'auto' and strict false.",
            param=f"{function.where}.parameters",
        )
    return parameters


def _embedded(schema: dict[str, Any], where: str) -> str:
    try:
        grammar = json.loads(json_schema_grammar(schema))
    except StructuredError as error:
        place = f"{where}{error.place.replace('/', '.')}"
        raise InvalidRequest(
            f"'{place}' cannot be enforced: {error.message}.", param=where
        ) from error
    return json.dumps(grammar["grammars"][0]["json_schema"], ensure_ascii=False)
