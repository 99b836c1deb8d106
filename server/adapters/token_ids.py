"""`return_token_ids`: where ids stand in choices and chunks, as vLLM has them.

Ids are told as the engine makes them and wait here for the next chunk of their choice. Knows no
dialect but the names of the fields.
"""

from __future__ import annotations

from typing import Any

from server.events import PromptTokens, TokenIds

Fields = dict[str, Any]


class TokenIdFields:
    """`fields` of a choice are empty when nothing waits, so also when nobody asked for ids."""

    def __init__(self) -> None:
        self._waiting: dict[int, Fields] = {}

    def take(self, event: PromptTokens | TokenIds) -> None:
        fields = self._waiting.setdefault(event.index, {})
        name = "prompt_token_ids" if isinstance(event, PromptTokens) else "token_ids"
        fields.setdefault(name, []).extend(event.token_ids)

    def fields(self, index: int) -> Fields:
        """What waited for choice `index`; nothing waits afterwards."""
        return self._waiting.pop(index, {})


def joined_ids(parts: list[Fields]) -> Fields:
    """The ids in the chunks of one choice, in order."""
    joined: Fields = {}
    for part in parts:
        for name in ("prompt_token_ids", "token_ids"):
            if name in part:
                joined[name] = joined.get(name, []) + part[name]
    return joined
