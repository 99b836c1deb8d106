"""The one incremental parser of tool calls: text in, content and calls out, for every family.

Rules, the same for all families:
- The events of a text do not depend on how it was cut into pieces (adjacent pieces of one kind
  may be cut differently; joined they are equal).
- Text that may still become an opening is held back, and so is space before it.
- Content before, between and after calls is content; space next to a call is dropped, except
  between two pieces of content.
- What looks like a call but is none (a broken head, a function that was not offered, an object
  that never ends) stays text, to the character. Once the name has been given out, arguments are
  passed on as the model wrote them, also if it is cut short.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from server.tool_parsers.buffer import TextBuffer
from server.tool_parsers.family import MalformedCall, ParserEvent, Reading, Text, ToolFamily
from server.tools import Functions

_Opening = tuple[int, str]


class ToolCallParser:
    """One use, one answer: `feed` text until there is no more, then `finish`."""

    def __init__(self, family: ToolFamily, functions: Functions) -> None:
        self._family = family
        self._functions = functions
        self._buffer = TextBuffer()
        self._has_content = False
        self._is_after_call = False
        self._reading = self._read()

    @property
    def num_decided(self) -> int:
        """Characters of the text that are not held back any more."""
        return self._buffer.offset

    def feed(self, text: str) -> list[ParserEvent]:
        self._buffer.push(text)
        return list(self._drain())

    def finish(self) -> list[ParserEvent]:
        """The text ended; gives out what was held back."""
        self._buffer.end()
        return list(self._drain())

    def _drain(self) -> Iterator[ParserEvent]:
        for event in self._reading:
            if event is None:
                return
            yield event

    def _read(self) -> Reading:
        while (opening := (yield from self._read_text())) is not None:
            start, text = opening
            try:
                yield from self._family.read_calls(self._buffer, start, self._functions)
            except MalformedCall:
                yield from self._content(start + len(text))
            else:
                self._is_after_call = True

    def _read_text(self) -> Generator[ParserEvent | None, None, _Opening | None]:
        """Give out content up to an opening; what is given back is its place and text."""
        while True:
            opening = self._find_opening()
            end = self._hold_from() if opening is None else opening[0]
            if opening is None and self._buffer.ended:
                yield from self._last_content()
                return None
            before = len(self._buffer.text[:end].rstrip())
            if before:
                yield from self._content(before)
            if opening is not None:
                return opening[0] - before, opening[1]
            yield None

    def _content(self, count: int) -> Iterator[Text]:
        """The first `count` characters, which do not all have to be space, as content."""
        if self._is_after_call and not self._has_content:
            text = self._buffer.text[:count]
            num_spaces = count - len(text.lstrip())
            self._buffer.take(num_spaces)
            count -= num_spaces
        self._is_after_call = False
        self._has_content = True
        start = self._buffer.offset
        yield Text(self._buffer.take(count), start)

    def _last_content(self) -> Iterator[Text]:
        rest = self._buffer.text
        if rest and not (self._is_after_call and rest.isspace()):
            yield from self._content(len(rest))
        else:
            self._buffer.take(len(rest))

    def _find_opening(self) -> _Opening | None:
        text = self._buffer.text
        found = [(text.find(opening), opening) for opening in self._family.openings]
        found = [(start, opening) for start, opening in found if start >= 0]
        bare = self._family.bare
        if bare and not self._has_content and not self._is_after_call:
            start = len(text) - len(text.lstrip())
            if text.startswith(bare, start):
                found.append((start, bare))
        return min(found, key=lambda item: (item[0], -len(item[1])), default=None)

    def _hold_from(self) -> int:
        """Where the longest tail begins that could be the front of an opening."""
        text = self._buffer.text
        longest = max((len(opening) for opening in self._family.openings), default=1)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(opening.startswith(text[start:]) for opening in self._family.openings):
                return start
        return len(text)
