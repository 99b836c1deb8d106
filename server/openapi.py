"""How the OpenAPI document describes bodies that the routes read by hand.

The framework sees no body model, since any Content-Type must be read as JSON; so each route says
with `openapi_extra=json_body(Model)` what it reads. Knows pydantic's schemas, no route.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_PART: dict[str, Any] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_CALL: dict[str, Any] = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                "arguments": {"type": "string"},
            },
        },
    },
}
_TEXT_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user"]},
        "content": _CONTENT,
        "name": {"type": "string"},
    },
}
_ASSISTANT_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"const": "assistant"},
        "content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
        "name": {"type": "string"},
        "reasoning_content": {"type": "string"},
        "tool_calls": {"type": "array", "items": _CALL},
    },
}
_RESULT_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content", "tool_call_id"],
    "properties": {
        "role": {"const": "tool"},
        "content": _CONTENT,
        "tool_call_id": {"type": "string"},
    },
}

MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [_TEXT_MESSAGE, _ASSISTANT_MESSAGE, _RESULT_MESSAGE]},
}
"""`messages` of a chat, as `messages.py` reads it."""

_TOKEN_IDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0},
}

PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
    ]
}
"""`prompt` of a completion and `input` of an embedding: texts or token ids, one or several. (A
completion takes an empty text too, of a model that has a token to begin with.)"""


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
