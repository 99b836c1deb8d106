"""From recorded steps to Chrome's trace event format, for Perfetto and chrome://tracing. Pure.

Complete events (`ph` "X", microseconds since the first one) in the order of their beginnings; each
track is a thread of a process and is named when it first appears. Requests that wait at the same
time lie in rows of their own, since events of one row must nest.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.span import Category, Span, TracedStep, ns_per_tick

ENGINE, REQUESTS = "engine", "requests"
_BATCH = 500


def trace_json(steps: Sequence[TracedStep], facts: Mapping[str, Any]) -> Iterator[bytes]:
    """The document in pieces. `facts` become its `otherData`."""
    head = json.dumps({"displayTimeUnit": "ms", "otherData": facts})
    yield head[:-1].encode() + b', "traceEvents": [\n'
    batch: list[str] = []
    for number, event in enumerate(trace_events(steps)):
        batch.append((",\n" if number else "") + json.dumps(event))
        if len(batch) == _BATCH:
            yield "".join(batch).encode()
            batch.clear()
    yield "".join(batch).encode() + b"\n]}\n"


def trace_events(steps: Sequence[TracedStep]) -> Iterator[dict[str, Any]]:
    spans = ordered_spans(steps)
    tracks = _Tracks()
    base_ns: int | None = None
    for span in spans:
        base_ns = span.start_ns if base_ns is None else base_ns
        process, track = tracks.place(span)
        yield from tracks.new_names()
        yield {
            "ph": "X",
            "name": span.name,
            "cat": str(span.category),
            "pid": process,
            "tid": track,
            "ts": (span.start_ns - base_ns) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            "args": dict(span.args),
        }


def ordered_spans(steps: Sequence[TracedStep]) -> Iterator[Span]:
    """By their beginnings, the outer one first. Only waiting may begin before its step."""
    tick_ns = ns_per_tick([team for step in steps for team in step.teams])

    def in_steps() -> Iterator[Span]:
        for step in steps:
            spans = step.all_spans(tick_ns)
            yield from (span for span in spans if span.category is not Category.QUEUE)

    queued = [span for step in steps for span in step.spans if span.category is Category.QUEUE]
    return heapq.merge(sorted(queued, key=_order), in_steps(), key=_order)


def _order(span: Span) -> tuple[int, int]:
    return span.start_ns, -span.end_ns


class _Tracks:
    """Numbers of processes and threads, and the events that name them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], tuple[int, int]] = {}
        self._queue_ends_ns: list[int] = []
        self._new: list[dict[str, Any]] = []

    def place(self, span: Span) -> tuple[int, int]:
        if span.category is Category.QUEUE:
            return self._number(REQUESTS, self._free_row(span))
        return self._number(ENGINE, span.track)

    def new_names(self) -> list[dict[str, Any]]:
        new, self._new = self._new, []
        return new

    def _free_row(self, span: Span) -> str:
        """The first row in which nobody waits any more."""
        ends_ns = self._queue_ends_ns
        row = next((i for i, end in enumerate(ends_ns) if end <= span.start_ns), len(ends_ns))
        ends_ns[row : row + 1] = [span.end_ns]
        return span.track if row == 0 else f"{span.track} {row + 1}"

    def _number(self, process: str, track: str) -> tuple[int, int]:
        key = process, track
        if key not in self._numbers:
            pid, tid = (1 if process == ENGINE else 2), len(self._numbers) + 1
            if pid not in {number for number, _ in self._numbers.values()}:
                self._new.append(_name("process_name", pid, 0, process))
            self._new.append(_name("thread_name", pid, tid, track))
            self._numbers[key] = pid, tid
        return self._numbers[key]


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
