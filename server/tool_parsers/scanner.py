"""Finds the end of a bracketed value in text that arrives in pieces. Knows no grammar.

Brackets are counted, not matched by kind, and strings are skipped with their escapes: enough to
find where a well-formed value ends, in time linear in its length.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64

_JSON = re.compile(r'["{}\[\]]')
_PYTHON = re.compile(r"""["'{}\[\]()]""")
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


class BracketScanner:
    """Scan pieces in order. `depth` 1: the opening bracket is already behind."""

    def __init__(self, *, python: bool = False, depth: int = 0) -> None:
        self._outside = _PYTHON if python else _JSON
        self._depth = depth
        self._quote = ""
        self._escaped = False
        self.too_deep = False

    def scan(self, text: str, start: int = 0) -> int | None:
        """The place behind the closing bracket; None if it is not in `text`, which is used up."""
        position = start
        while True:
            if self._escaped:
                if position >= len(text):
                    return None
                self._escaped = False
                position += 1
            pattern = _IN_STRING[self._quote] if self._quote else self._outside
            match = pattern.search(text, position)
            if match is None:
                return None
            position = match.end()
            self._see(match[0])
            if self._depth == 0 and not self._quote and match[0] in "}])":
                return position

    def _see(self, character: str) -> None:
        if character == "\\":
            self._escaped = True
        elif character == self._quote:
            self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in "{[(":
            self._depth += 1
            self.too_deep |= self._depth > MAX_DEPTH
        else:
            self._depth -= 1
