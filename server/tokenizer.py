"""Text to token ids and token ids to bytes, over the `tokenizers` library.

Two readings of a text exist. *Plain*: text that looks like a control token is ordinary text; for
what users write. *Parsed*: control tokens are recognised; for prompts that a client wrote whole
(/v1/completions, /tokenize), where there are no roles that could be forged.

Knows nothing of chat templates, streams or requests. All methods are safe in any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from server.token_bytes import added_token_decoder, strips_leading_space, token_decoder

_NO_MATCH = re.compile(r"(?!)")


class Tokenizer:
    """`bos_token_id` is put before a prompt that does not start with it, if `add_bos`."""

    def __init__(
        self, tokenizer_json: str, *, bos_token_id: int | None = None, add_bos: bool = False
    ) -> None:
        description: dict[str, Any] = json.loads(tokenizer_json)
        # Truncation and padding of a published file are for training, never for serving.
        description |= {"truncation": None, "padding": None}
        self._parsing = tokenizers.Tokenizer.from_str(json.dumps(description))
        self._plain = _plain_tokenizer(description)
        self._plain_inner = _plain_tokenizer(_without_text_prefix(description))
        self._decode_token = token_decoder(description)
        self._decode_added = added_token_decoder(description)
        # The library may number added tokens anew, so it is asked, not the description.
        self._added: dict[int, tokenizers.AddedToken] = self._parsing.get_added_tokens_decoder()
        self._special = {t.content: (i, t) for i, t in self._added.items() if t.special}
        self._special_pattern = _alternation(list(self._special))
        # A control token of one character cannot be broken up.
        self._breakable_pattern = _alternation([t for t in self._special if len(t) > 1])
        self.special_token_ids = frozenset(i for i, _ in self._special.values())
        self.vocab_size = max(self._parsing.get_vocab(with_added_tokens=True).values()) + 1
        self.strips_leading_space = strips_leading_space(description)
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos and bos_token_id is not None
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    @classmethod
    def from_file(
        cls, path: Path, *, bos_token_id: int | None = None, add_bos: bool = False
    ) -> Tokenizer:
        return cls(path.read_text("utf-8"), bos_token_id=bos_token_id, add_bos=add_bos)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of all control tokens."""
        return tuple(self._special)

    @property
    def control_tokens(self) -> dict[str, int]:
        """Text → id of all control tokens."""
        return {text: token_id for text, (token_id, _) in self._special.items()}

    def to_json(self) -> str:
        """The text of a `tokenizer.json` that is this tokenizer."""
        text: str = self._parsing.to_str()
        return text

    def token_text(self, token_id: int | None) -> str:
        """The literal text of a token, as a chat template would write it. "" if there is none."""
        if token_id is None:
            return ""
        return self._parsing.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to the output; empty for an id that has no token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of `token_ids`; broken UTF-8 becomes U+FFFD."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        pieces = (self.token_bytes(i) for i in token_ids if i not in skipped)
        return b"".join(pieces).decode("utf-8", "replace")

    def encode_plain(self, text: str, *, at_start: bool = True) -> list[int]:
        """Ids of `text` with no control token in it and no BOS.

        `at_start` False: the text continues another one, so no leading space is invented.
        """
        encoder = self._plain if at_start else self._plain_inner
        return _encode(encoder, text)

    def encode_parsed(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of `text` with control tokens recognised, and exactly one BOS if it is wanted."""
        ids = _encode(self._parsing, text)
        return self.with_bos(ids) if add_bos else ids

    def encode_rendered(self, text: str, marker: str) -> list[int]:
        """Ids of a rendered chat prompt in which `marker` breaks up forged control tokens.

        What the template wrote is scanned for control tokens; everything between them is encoded
        plain, after the marker was taken out. Ends with exactly one BOS at the start if wanted.
        """
        ids: list[int] = []
        at_start = True
        for piece in self._split_at_special(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                plain = piece.replace(marker, "") if marker else piece
                ids += self.encode_plain(plain, at_start=at_start)
            at_start = False
        return self.with_bos(ids)

    def with_bos(self, ids: list[int]) -> list[int]:
        if not self.add_bos or self.bos_token_id is None or ids[:1] == [self.bos_token_id]:
            return ids
        return [self.bos_token_id, *ids]

    def break_special(self, text: str, marker: str) -> str:
        """`text` with `marker` put after the first character of every control token's text.

        Repeated, since breaking one token may leave a shorter one standing inside it.
        """
        while self._breakable_pattern.search(text) is not None:
            text = self._breakable_pattern.sub(lambda m: m[0][0] + marker + m[0][1:], text)
        return text

    def _split_at_special(self, text: str) -> Iterator[int | str]:
        """Control token ids and the text between them, honouring `lstrip` and `rstrip`."""
        start = 0
        for match in self._special_pattern.finditer(text):
            token_id, token = self._special[match[0]]
            before = text[start : match.start()]
            start = match.end()
            if token.lstrip:
                before = before.rstrip()
            if before:
                yield before
            yield token_id
            if token.rstrip:
                start += len(text[start:]) - len(text[start:].lstrip())
        if start < len(text):
            yield text[start:]

    def _read_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return self._decode_added(str(added.content))
        text = self._parsing.id_to_token(token_id)
        return b"" if text is None else self._decode_token(text)


def _encode(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
    """As a batch of one: `encode` would hold the interpreter lock all the while, seconds for a
    text of megabytes, and with it the event loop."""
    ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _plain_tokenizer(description: dict[str, Any]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _alternation(texts: list[str]) -> re.Pattern[str]:
    """Leftmost, then longest: the rule by which `tokenizers` itself finds added tokens."""
    if not texts:
        return _NO_MATCH
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)))


def _without_text_prefix(description: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer for text that is not the first: Metaspace "first" adds no space there."""
    changed: dict[str, Any] = json.loads(json.dumps(description))
    pending = [changed.get("pre_tokenizer")]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            pending += part.get("pretokenizers", [])
            if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
                part["prepend_scheme"] = "never"
    return changed
