"""The bytes of a body to a JSON object, whatever the Content-Type says.

Rules: UTF-8 only; one leading byte order mark is skipped; of duplicate keys the last one counts;
NaN and Infinity are not JSON; lone surrogates are refused in every string and key; nesting is
measured before the parser recurses into it. Knows nothing of fields.
"""

from __future__ import annotations

import json
import re
from typing import Any

from server.errors import InvalidRequest
from server.limits import MAX_JSON_DEPTH

# A string (also one that never ends: no character is ever looked at twice) or a bracket.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.?)*+(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_body(raw: bytes) -> dict[str, Any]:
    """Raises InvalidRequest with one sentence; never any other error."""
    text = _decode(raw)
    if not text.strip():
        raise InvalidRequest("The request body is empty; a JSON object is needed.")
    check_depth(text, None)
    value = _loads(text)
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    if _SURROGATE_ESCAPE.search(text):
        check_text(value, None)
    if "NaN" in text or "Infinity" in text:
        _check_numbers(value)
    return value


def check_depth(text: str, where: str | None) -> None:
    """Raise InvalidRequest if JSON `text` nests deeper than MAX_JSON_DEPTH."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        first = text[match.start()]
        if first in "[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise InvalidRequest(
                    f"The JSON is nested deeper than {MAX_JSON_DEPTH} levels.", param=where
                )
        elif first != '"':
            depth -= 1


def check_text(value: Any, where: str | None) -> None:
    """Raise InvalidRequest if a string or key of `value` holds half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "A string in the request holds a lone surrogate (half of an emoji, as \\ud83d), "
            "which is not valid text.",
            param=where,
        ) from error


def _decode(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The request body is not UTF-8 JSON: byte {error.start} is not valid UTF-8."
        ) from error
    return text


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_NotANumber)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}."
        ) from error
    except RecursionError as error:
        raise InvalidRequest("The JSON is nested too deeply.") from error
    except ValueError as error:  # An integer of more than 4,300 digits.
        raise InvalidRequest("The request body holds a number that is far too long.") from error


class _NotANumber:
    """Stands where NaN or an infinity was, so that the field can be named."""

    def __init__(self, name: str) -> None:
        self.name = name


def _check_numbers(value: dict[str, Any]) -> None:
    for key, item in value.items():
        if (found := _find(item)) is not None:
            raise InvalidRequest(
                f"'{key[:80]}' holds {found.name}, which is not a JSON number.", param=key[:80]
            )


def _find(value: Any) -> _NotANumber | None:
    if isinstance(value, _NotANumber):
        return value
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return next((found for item in items if (found := _find(item))), None)
    return None
