"""Text that arrives in pieces, for parsers written as generators.

A parser looks ahead in `text` and takes from its front what it has decided about. Where it needs
more text it yields None and goes on when there is more, or when there will be none. So a parser
reads like one for a whole text, and how that text was cut cannot change what it finds.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A generator that yields nothing but "more text, please"."""

_NOT_SPACE = re.compile(r"\S")


class TextBuffer:
    """`offset` counts the characters that were taken before `text`."""

    def __init__(self) -> None:
        self.text = ""
        self.offset = 0
        self.ended = False

    def push(self, text: str) -> None:
        self.text += text

    def end(self) -> None:
        self.ended = True

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        self.offset += count
        return taken

    def skip_space(self, start: int) -> Wait[int]:
        """The place of the first character from `start` that is no space; the end if none is."""
        while (match := _NOT_SPACE.search(self.text, start)) is None:
            start = len(self.text)
            if self.ended:
                return start
            yield None
        return match.start()

    def expects(self, start: int, *texts: str) -> Wait[str | None]:
        """Which of `texts` stands at `start`; None if none does."""
        while True:
            for text in texts:
                if self.text.startswith(text, start):
                    return text
            rest = self.text[start:]
            if self.ended or not any(text.startswith(rest) for text in texts):
                return None
            yield None

    def find(self, text: str, start: int) -> Wait[int]:
        """The place of the next `text`; -1 if the whole text ends without one."""
        while (found := self.text.find(text, start)) < 0:
            start = max(start, len(self.text) - len(text) + 1)
            if self.ended:
                return -1
            yield None
        return found

    def skip(self, *texts: str) -> Wait[bool]:
        """Take one of `texts` with the space before it, if it comes next; or what the end of all
        text left of one."""
        start = yield from self.skip_space(0)
        found = yield from self.expects(start, *texts)
        if found is not None:
            self.take(start + len(found))
        elif any(text.startswith(self.text[start:]) for text in texts):
            self.take(len(self.text))
        return found is not None
