"""Text to the token ids that an encoder reads, its special tokens around them.

Text is read *plain*: what looks like a special token is ordinary text, so nobody can end a text
early by writing [SEP]. Knows nothing of requests. All methods are safe in any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers


class EncoderTokenizer:
    """`num_special_tokens` are added to every text, `num_pair_tokens` to every pair of texts;
    `vocab_size` is the highest id and one."""

    def __init__(self, tokenizer_json: str) -> None:
        description: dict[str, Any] = json.loads(tokenizer_json)
        # Truncation and padding of a published file are for training, never for serving.
        description |= {"truncation": None, "padding": None}
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
        self._tokenizer.encode_special_tokens = True
        self.num_special_tokens: int = self._tokenizer.num_special_tokens_to_add(False)
        self.num_pair_tokens: int = self._tokenizer.num_special_tokens_to_add(True)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_file(cls, path: Path) -> EncoderTokenizer:
        return cls(path.read_text("utf-8"))

    def encode(self, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
        """The ids of `text`; with `max_tokens` (above `num_special_tokens`) its beginning only."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if max_tokens is not None:
            encoding.truncate(max(0, max_tokens - self.num_special_tokens))
        return tuple(self._tokenizer.post_process(encoding).ids)

    def encode_pair(
        self, query: str, document: str, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """The ids of both as one text; with `max_tokens` the document's beginning only, of which
        nothing may be left."""
        first, second = (
            self._tokenizer.encode(text, add_special_tokens=False) for text in (query, document)
        )
        if max_tokens is not None:
            second.truncate(max(0, max_tokens - self.num_pair_tokens - len(first)))
        return tuple(self._tokenizer.post_process(first, second).ids)

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """The ids of `text` without special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included, as the vocabulary has it."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""
