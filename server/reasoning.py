"""Splits what a model thinks from what it answers: the `<think>…</think>` families.

Rules:
- A thought stands at the start of an answer or nowhere. `<think>` later on is text.
- A template that ends the prompt with `<think>` has begun the thought: the answer starts inside it,
  and a model that writes the tag once more is forgiven.
- Space next to the tags belongs to neither side.
- An answer that ends inside its thought is all thought.

What a client may ask for: `chat_template_kwargs` go to the template as they are (`enable_thinking`
is the off switch of most families). `reasoning_effort` "none" is the same off switch; "minimal",
"low", "medium" and "high" bound the thought to a number of tokens (`EFFORT_TOKENS`), and an exact
`thinking_budget` wins over it. When the budget is used up `</think>` is put there and the model
goes on from it (`thinking_budget.py`).

Knows text only; which models reason is decided once, from their template (`output_format.py`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from server.tool_parsers.buffer import TextBuffer

START, END = "<think>", "</think>"
TAGS = (START, END)

EFFORT_TOKENS: dict[str, int | None] = {
    "none": 0,
    "minimal": 128,
    "low": 512,
    "medium": 2_048,
    "high": None,
    "xhigh": None,
}
"""`reasoning_effort` → most tokens of a thought; None for no bound."""


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """`start` is its place in the whole text."""

    text: str
    start: int


_Reading = Generator[Thought | Answer | None, None, None]


def starts_inside(prompt: str, continued: str = "") -> bool:
    """Whether an answer to this rendered prompt begins inside a thought.

    `continued`: the final message that the answer goes on with, if there is one.
    """
    if continued:
        return continued.rfind(START) > continued.rfind(END)
    return prompt.rstrip().endswith(START)


class ReasoningSplitter:
    """One use, one answer. `is_thinking` is None while that is still open."""

    def __init__(self, *, starts_inside: bool) -> None:
        self.is_thinking: bool | None = True if starts_inside else None
        self._buffer = TextBuffer()
        self._reading = self._read()

    @property
    def num_decided(self) -> int:
        """Characters of the text that are not held back any more."""
        return self._buffer.offset

    def feed(self, text: str) -> list[Thought | Answer]:
        self._buffer.push(text)
        return self._drain()

    def finish(self) -> list[Thought | Answer]:
        self._buffer.end()
        return self._drain()

    def _drain(self) -> list[Thought | Answer]:
        events: list[Thought | Answer] = []
        for event in self._reading:
            if event is None:
                break
            events.append(event)
        return events

    def _read(self) -> _Reading:
        buffer = self._buffer
        start = yield from buffer.skip_space(0)
        if (yield from buffer.expects(start, START)) is not None:
            buffer.take(start + len(START))
            self.is_thinking = True
        if self.is_thinking:
            yield from self._read_thought()
        self.is_thinking = False
        while True:
            if buffer.text:
                place = buffer.offset
                yield Answer(buffer.take(len(buffer.text)), place)
            yield None

    def _read_thought(self) -> _Reading:
        buffer = self._buffer
        buffer.take((yield from buffer.skip_space(0)))
        while (end := buffer.text.find(END)) < 0 and not buffer.ended:
            shown = len(buffer.text[: _hold_from(buffer.text)].rstrip())
            if shown:
                yield Thought(buffer.take(shown))
            yield None
        thought = buffer.text if end < 0 else buffer.text[:end].rstrip()
        if thought:
            yield Thought(thought)
        buffer.take(len(buffer.text) if end < 0 else end + len(END))
        self.is_thinking = False
        buffer.take((yield from buffer.skip_space(0)))


def _hold_from(text: str) -> int:
    """Where the longest tail begins that could be the front of the end tag."""
    for start in range(max(0, len(text) - len(END) + 1), len(text)):
        if END.startswith(text[start:]):
            return start
    return len(text)
