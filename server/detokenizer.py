"""Token ids to text, one at a time, without ever showing half a character.

Bytes go through an incremental UTF-8 decoder, which holds back an incomplete tail. The final
flush turns such a tail into one U+FFFD; bytes that can never become valid turn into U+FFFD at
once. Knows nothing of stop strings or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from server.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence's output. Owned by one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        strips_leading_space: bool = False,
        markers: Collection[str] = (),
    ) -> None:
        """`strips_leading_space`: drop the one space that SentencePiece puts before a text.

        `markers`: control tokens that are shown although the others are skipped.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        if markers:
            self._skipped -= {tokenizer.control_tokens.get(marker, -1) for marker in markers}
        self._strips_next_space = strips_leading_space
        self._decoder = _Utf8Decoder("replace")

    def is_skipped(self, token_id: int) -> bool:
        return token_id in self._skipped

    def push(self, token_id: int) -> str:
        """The characters that this token completes; "" while one is still incomplete."""
        if token_id in self._skipped:
            return ""
        return self._strip(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """The end of the text: "" or one U+FFFD for an incomplete character."""
        return self._strip(self._decoder.decode(b"", True))

    @property
    def holds_bytes(self) -> bool:
        """Whether the last token left a character incomplete."""
        return self._decoder.getstate()[0] != b""

    def _strip(self, text: str) -> str:
        if not self._strips_next_space or not text:
            return text
        self._strips_next_space = False
        return text.removeprefix(" ")
