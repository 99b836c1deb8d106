"""A trace of real steps as `hexlm trace` wrote it (Chrome's trace event format), read back. Pure.

Times in seconds. What an event is comes from its category (`engine/span.py`), where it happened
from the name of its track.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.span import Category

TEAM = "cpu thread "


class StepKind(StrEnum):
    """A step with tokens of prompts, or one that only decodes."""

    DECODE = "decode"
    PROMPT = "prompt"


class NotATrace(ValueError):
    """The message is one line and says what is wrong with the file."""


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    category: Category
    track: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Step:
    """`event` is the step itself, `parts` all that happened in it, by beginning."""

    event: Event
    parts: tuple[Event, ...]

    @property
    def kind(self) -> StepKind:
        return StepKind.PROMPT if self.number("prefill_tokens") else StepKind.DECODE

    @property
    def tracks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.track for part in self.parts))

    def number(self, name: str) -> float:
        """One of its arguments."""
        return float(self.event.args.get(name, 0))

    def of(self, *categories: Category) -> list[Event]:
        return [part for part in self.parts if part.category in categories]

    def seconds(self, *categories: Category) -> float:
        """Threads of a team work side by side: they count as one, with their mean."""
        parts = self.of(*categories)
        num_threads = max(1, sum(track.startswith(TEAM) for track in self.tracks))
        team_s = sum(part.seconds for part in parts if part.track.startswith(TEAM))
        others_s = sum(part.seconds for part in parts if not part.track.startswith(TEAM))
        return team_s / num_threads + others_s

    def phase_s(self, name: str) -> float:
        """Of a phase of the step loop."""
        wanted = self.of(Category.OWN, Category.EXECUTE)
        return sum(part.seconds for part in wanted if part.name == name)

    @property
    def matrix_s(self) -> float:
        """Segments contain their calls; a form for whole steps has calls only."""
        if self.of(Category.SEGMENT):
            return self.seconds(Category.MODEL, Category.SEGMENT)
        return self.seconds(Category.MODEL, Category.NPU_CALL)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """`about`: what the server said of itself. `queued`: the waiting of each request."""

    about: Mapping[str, Any]
    steps: tuple[Step, ...]
    queued: tuple[Event, ...]

    def of(self, kind: StepKind) -> list[Step]:
        return [step for step in self.steps if step.kind is kind]


def read_trace(document: object) -> TraceFile:
    """Raises NotATrace."""
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise NotATrace("it has no traceEvents")
    try:
        ours = list(_events(events))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotATrace(f"its events are not those of hexlm trace ({error})") from error
    steps = sorted(
        (event for event in ours if event.category is Category.STEP), key=lambda e: e.start_s
    )
    if not steps:
        raise NotATrace("it has no steps of hexlm trace")
    about = document.get("otherData") if isinstance(document, dict) else None
    queued = tuple(event for event in ours if event.category is Category.QUEUE)
    return TraceFile(about if isinstance(about, dict) else {}, _grouped(steps, ours), queued)


def _events(events: Sequence[Any]) -> Iterable[Event]:
    tracks = {
        (event["pid"], event["tid"]): str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    known = {str(category): category for category in Category}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in known:
            start_s = float(event["ts"]) / 1e6
            end_s = (float(event["ts"]) + float(event["dur"])) / 1e6
            track = tracks.get((event.get("pid"), event.get("tid")), "")
            args = event.get("args") or {}
            yield Event(str(event["name"]), known[event["cat"]], track, start_s, end_s, dict(args))


def _grouped(steps: Sequence[Event], events: Iterable[Event]) -> tuple[Step, ...]:
    """The events that begin in each step."""
    starts_s = [step.start_s for step in steps]
    parts: list[list[Event]] = [[] for _ in steps]
    for event in sorted(events, key=lambda e: (e.start_s, -e.end_s)):
        index = bisect_right(starts_s, event.start_s) - 1
        is_part = event.category not in (Category.STEP, Category.QUEUE)
        if is_part and index >= 0 and event.start_s < steps[index].end_s:
            parts[index].append(event)
    return tuple(Step(step, tuple(own)) for step, own in zip(steps, parts, strict=True))
