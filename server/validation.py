"""A parsed JSON object to a request model, with errors a person can read.

Knows pydantic's errors and OpenAI's names for places (`messages[0].content`); not the fields.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import InvalidRequest
from server.limits import MAX_ERROR_MESSAGE_CHARS

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)

_MAX_ERRORS = 3
_MAX_LOGGED_NAMES = 1_000
_MAX_REASON_CHARS = 80


class BodyReader:
    """Validates bodies. Remembers which unknown names it has logged: each is logged once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def read(self, kind: type[Body], value: dict[str, Any]) -> Body:
        """Raises InvalidRequest; `param` is the first wrong field. Nulls count as absent."""
        given = {name: item for name, item in value.items() if item is not None}
        self._log_unknown(kind, given)
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            raise _invalid_request(error) from error

    def _log_unknown(self, kind: type[BaseModel], given: dict[str, Any]) -> None:
        new = given.keys() - kind.model_fields.keys() - self._logged
        if new and len(self._logged) < _MAX_LOGGED_NAMES:
            self._logged |= new
            names = ", ".join(sorted(name[:40] for name in new)[:20])
            logger.info("ignored unknown request fields: %s", names)


def _invalid_request(error: ValidationError) -> InvalidRequest:
    by_field: dict[str, str] = {}
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        by_field.setdefault(field_path(item["loc"]), item["msg"])
    sentences = [
        f"'{name}': {message[:_MAX_REASON_CHARS]}"
        for name, message in list(by_field.items())[:_MAX_ERRORS]
    ]
    message = "Invalid value for " + "; ".join(sentences) + "."
    return InvalidRequest(message[:MAX_ERROR_MESSAGE_CHARS], param=next(iter(by_field)))


def field_path(location: tuple[int | str, ...]) -> str:
    """`('stop', 'list[…]', 3)` → `stop[3]`: the names of union branches are not places."""
    path = str(location[0])
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            path += f".{part}"
    return path[:200]


_BRANCHES = {"str", "int", "float", "bool", "constrained-str", "constrained-int", "literal"}
