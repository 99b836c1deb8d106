"""Log-probabilities in the shapes of the chat and of the completions endpoint.

A token's `bytes` are its true bytes, also when they are a part of a character; such a token's
text is written `bytes:\\xf0\\x9f`, as OpenAI does, so that no two tokens look alike.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from engine.logprobs import TokenLogprobs
from server.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entries(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """The items of `logprobs.content`."""
    return [
        {
            **_chat_entry(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_entry(tokenizer, i, logprob) for i, logprob in entry.top],
        }
        for entry in logprobs
    ]


class LegacyLogprobs:
    """Builds the parallel lists of a completions choice; offsets are characters of its text."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._decoder = _Utf8Decoder("replace")

    def take_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text_length: int
    ) -> dict[str, Any]:
        """The lists for an echoed prompt whose text has `text_length` characters.

        Tokens that the text does not show (an added BOS) make offsets run ahead: they are cut.
        """
        hidden = sum(len(self._tokenizer.decode([i])) for i in token_ids) - text_length
        lists = self._lists([*zip(token_ids, logprobs, strict=True)])
        shift = max(0, hidden)
        lists["text_offset"] = [
            min(max(0, offset - shift), text_length) for offset in lists["text_offset"]
        ]
        self._offset = text_length
        self._decoder.reset()
        return lists

    def take(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The lists for the next tokens."""
        return self._lists([(entry.token_id, entry) for entry in logprobs])

    def _lists(self, entries: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        offsets: list[int] = []
        for token_id, _ in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return {
            "tokens": [token_name(self._tokenizer, token_id) for token_id, _ in entries],
            "token_logprobs": [entry and _finite(entry.logprob) for _, entry in entries],
            "top_logprobs": [entry and self._top(entry) for _, entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and always the token itself; of equal names the likelier one."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(token_name(self._tokenizer, token_id), _finite(logprob))
        return top


def join_legacy(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The lists of several pieces as one; None if there were no pieces."""
    if not parts:
        return None
    return {key: [item for part in parts for item in part[key]] for key in parts[0]}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(float(logprob), FLOOR) if not math.isnan(logprob) else FLOOR
