"""Tells a model in its prompt which JSON Schema its answer has to match.

A grammar keeps an answer in form, but only the prompt makes a model want it: without, a small one
is led through fields that it has never heard of. OpenAI's API tells its models too. The text ends
the last message of the user, where it is heeded best, or stands in a system message if the user
says nothing. Knows messages; not when a schema is told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.messages import Message

_INTRODUCTION = "Respond only with JSON that conforms to the following JSON schema:"


def with_schema(messages: Sequence[Message], schema: dict[str, Any]) -> list[Message]:
    """The conversation with `schema` told in it. The messages themselves are not changed."""
    text = f"{_INTRODUCTION}\n{json.dumps(schema, ensure_ascii=False)}"
    told = list(messages)
    for index in range(len(told) - 1, -1, -1):
        if told[index]["role"] == "user":
            told[index] = told[index] | {"content": f"{told[index]['content']}\n\n{text}"}
            return told
    return [{"role": "system", "content": text}, *told]
