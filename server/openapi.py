"""How the OpenAPI document describes bodies that the routes read by hand.

The framework sees no body model, since any Content-Type must be read as JSON; so each route says
with `openapi_extra=json_body(Model)` what it reads. Knows pydantic's schemas, no route.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                    {"type": "null"},
                ]
            },
            "name": {"type": "string"},
            "tool_call_id": {"type": "string"},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
        },
    },
}
"""`messages` of a chat, as `messages.py` reads it."""

_TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}

PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS},
    ]
}
"""`prompt` of a completion: texts or token ids, one or several."""


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is a `model`. Definitions are written in place:
    a reference would be looked for in the whole document and not in the schema."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    inlined = _inline(schema, definitions, ())
    content = {"application/json": {"schema": inlined}}
    return {"requestBody": {"required": True, "content": content}}


def _inline(node: Any, definitions: dict[str, Any], inside: tuple[str, ...]) -> Any:
    """`node` without references; one that leads back into itself becomes any value."""
    if isinstance(node, list):
        return [_inline(item, definitions, inside) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" not in node:
        return {key: _inline(item, definitions, inside) for key, item in node.items()}
    name = str(node["$ref"]).rpartition("/")[2]
    if name in inside:
        return {}
    return _inline(definitions[name], definitions, (*inside, name))
