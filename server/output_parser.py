"""An answer's text to events: thought, content and tool calls, after the one text pipeline.

```
ChoiceText ──text──► ReasoningSplitter ──answer──► ToolCallParser ──► events
```
Each stage has a null object that passes everything on; an answer with neither stage goes through
`PlainOutput` whole. Otherwise tokens come one by one, so that a thought's tokens can be counted and
logprobs given to content only: a token's entry is kept if a character of it became content.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.logprobs import TokenLogprobs
from server.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from server.reasoning import Answer, ReasoningSplitter, Thought
from server.tool_parsers.family import CallArguments, CallStart, ParserEvent, Text
from server.tool_parsers.parser import ToolCallParser
from server.tool_parsers.registry import find_family
from server.tools import Functions

_Entries = Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the answers of a request are read. `tool_parser` "": calls are not looked for.

    `starts_inside`: the prompt has begun a thought.
    """

    tool_parser: str = ""
    functions: Functions = field(default_factory=dict)
    reasons: bool = False
    starts_inside: bool = False


class OutputParser(Protocol):
    """Of one choice. `by_token`: wants the text of one token at a time."""

    by_token: bool

    @property
    def has_calls(self) -> bool: ...

    @property
    def num_reasoning_tokens(self) -> int: ...

    def push(self, text: str, logprobs: _Entries, num_tokens: int) -> list[Event]:
        """The next text, the entries that came with it, and how many tokens were taken in."""
        ...

    def finish(self) -> list[Event]:
        """The text ended."""
        ...


def new_output_parser(index: int, options: OutputOptions) -> OutputParser:
    """The parser of choice `index`."""
    if not options.tool_parser and not options.reasons:
        return PlainOutput(index)
    return SplitOutput(
        index,
        ReasoningSplitter(starts_inside=options.starts_inside)
        if options.reasons
        else NoReasoning(),
        ToolCallParser(find_family(options.tool_parser), options.functions)
        if options.tool_parser
        else NoTools(),
    )


class PlainOutput:
    """Everything is content."""

    by_token = False
    has_calls = False
    num_reasoning_tokens = 0

    def __init__(self, index: int) -> None:
        self._index = index

    def push(self, text: str, logprobs: _Entries, num_tokens: int) -> list[Event]:
        return [TextDelta(self._index, text, tuple(logprobs))] if text or logprobs else []

    def finish(self) -> list[Event]:
        return []


class NoReasoning:
    """Everything is answer."""

    is_thinking: bool | None = False

    def __init__(self) -> None:
        self.num_decided = 0

    def feed(self, text: str) -> list[Thought | Answer]:
        start, self.num_decided = self.num_decided, self.num_decided + len(text)
        return [Answer(text, start)] if text else []

    def finish(self) -> list[Thought | Answer]:
        return []


class NoTools:
    """Everything is content."""

    def __init__(self) -> None:
        self.num_decided = 0

    def feed(self, text: str) -> list[ParserEvent]:
        start, self.num_decided = self.num_decided, self.num_decided + len(text)
        return [Text(text, start)]

    def finish(self) -> list[ParserEvent]:
        return []


class SplitOutput:
    """Both stages, and the bookkeeping of tokens. Places are characters of the whole text."""

    by_token = True

    def __init__(
        self,
        index: int,
        reasoning: ReasoningSplitter | NoReasoning,
        tools: ToolCallParser | NoTools,
    ) -> None:
        self._index = index
        self._reasoning = reasoning
        self._tools = tools
        self._answer_start: int | None = None
        self._num_calls = 0
        self._num_undecided_tokens = 0
        self._logprobs = _ContentLogprobs()
        self.num_reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str, logprobs: _Entries, num_tokens: int) -> list[Event]:
        self._logprobs.add(len(text), logprobs)
        was_thinking = self._reasoning.is_thinking
        events = self._read(self._reasoning.feed(text))
        self._count(was_thinking, num_tokens)
        return self._with_logprobs(events)

    def finish(self) -> list[Event]:
        events = self._read(self._reasoning.finish())
        events += self._convert(self._tools.finish())
        return self._with_logprobs(events)

    def _read(self, parts: Iterable[Thought | Answer]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            match part:
                case Thought(text):
                    events.append(ReasoningDelta(self._index, text))
                case Answer(text, start):
                    if self._answer_start is None:
                        self._answer_start = start
                    events += self._convert(self._tools.feed(text))
        return events

    def _convert(self, parts: Iterable[ParserEvent]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            match part:
                case Text(text, start):
                    self._logprobs.add_content((self._answer_start or 0) + start, len(text))
                    events.append(TextDelta(self._index, text))
                case CallStart(name):
                    call_id = f"call_{secrets.token_hex(12)}"
                    events.append(ToolCallStart(self._index, self._num_calls, call_id, name))
                    self._num_calls += 1
                case CallArguments(text):
                    events.append(ToolCallArguments(self._index, self._num_calls - 1, text))
        return events

    def _count(self, was_thinking: bool | None, num_tokens: int) -> None:
        """The tags' own tokens count as thought."""
        is_thinking = self._reasoning.is_thinking
        if is_thinking is None:
            self._num_undecided_tokens += num_tokens
        elif is_thinking or was_thinking:
            self.num_reasoning_tokens += num_tokens + self._num_undecided_tokens
            self._num_undecided_tokens = 0

    def _with_logprobs(self, events: list[Event]) -> list[Event]:
        decided = self._reasoning.num_decided
        if self._answer_start is not None:
            decided = self._answer_start + self._tools.num_decided
        entries = self._logprobs.take(decided)
        if not entries:
            return events
        for i, event in enumerate(events):
            if isinstance(event, TextDelta):
                events[i] = replace(event, logprobs=entries)
                return events
        return [*events, TextDelta(self._index, "", entries)]


class _ContentLogprobs:
    """Entries wait until the text of their tokens is decided; those of content come out."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()
        self._content: deque[tuple[int, int]] = deque()
        self._num_pushed = 0

    def add(self, length: int, entries: _Entries) -> None:
        """The entries of the tokens whose text is the next `length` characters."""
        start, self._num_pushed = self._num_pushed, self._num_pushed + length
        self._waiting += ((start, self._num_pushed, entry) for entry in entries)

    def add_content(self, start: int, length: int) -> None:
        self._content.append((start, start + length))

    def take(self, decided: int) -> tuple[TokenLogprobs, ...]:
        """Entries of content among the tokens that end at or before `decided`."""
        taken: list[TokenLogprobs] = []
        while self._waiting and self._waiting[0][1] <= decided:
            start, end, entry = self._waiting.popleft()
            while self._content and self._content[0][1] < start:
                self._content.popleft()
            if any(first < end and start < last for first, last in self._content):
                taken.append(entry)
        if not self._waiting:
            self._content.clear()
        return tuple(taken)


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind, choice and call joined."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case TextDelta(a, before, entries), TextDelta(b, text, more) if a == b:
                joined[-1] = TextDelta(a, before + text, entries + more)
            case ReasoningDelta(a, before), ReasoningDelta(b, text) if a == b:
                joined[-1] = ReasoningDelta(a, before + text)
            case ToolCallArguments(a, i, before), ToolCallArguments(b, j, text) if (a, i) == (b, j):
                joined[-1] = ToolCallArguments(a, i, before + text)
            case _:
                joined.append(event)
    return joined
