"""Recorded steps for tests: made up ones, and what must be true of any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from engine.span import Category, Span, TeamTimes, TracedStep

START_NS = 1_700_000_000_000_000_000
MS = 1_000_000


def assert_nested(spans: Iterable[Span]) -> None:
    """On each track a span lies within another one or beside it, and none ends before it began."""
    tracks: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        tracks[span.track].append(span)
    for track, own in tracks.items():
        open_ends: list[int] = []
        for span in sorted(own, key=lambda s: (s.start_ns, -s.end_ns)):
            assert span.end_ns >= span.start_ns, (track, span)
            while open_ends and open_ends[-1] <= span.start_ns:
                open_ends.pop()
            assert not open_ends or span.end_ns <= open_ends[-1], (track, span)
            open_ends.append(span.end_ns)


def team_times(
    *threads: Sequence[int], start_ns: int = START_NS, end_ns: int = START_NS + MS
) -> TeamTimes:
    """Two phases of layer 0 and the head's, from the 7 ticks of each thread."""
    phases = (("qkv", 0), ("attention", 0), ("head", None))
    return TeamTimes(phases, np.array(threads, np.int64), start_ns, end_ns)


def traced_step(number: int, *inner: Span, prefill: int = 0, wait_ms: int = 0) -> TracedStep:
    """10 ms each, one after another: 1 ms of scheduling, 8 of execution, 1 of sampling."""
    start = START_NS + number * 10 * MS
    args = {
        "number": number, "sequences": 1, "tokens": prefill or 1, "decode_tokens": 0 if prefill
        else 1, "prefill_tokens": prefill, "rows": 1, "context": 64, "keys": 64, "attended": 64,
    }  # fmt: skip
    spans = [
        Span("step", Category.STEP, "step loop", start, start + 10 * MS, args),
        Span("schedule", Category.OWN, "step loop", start, start + MS),
        Span("execute", Category.EXECUTE, "step loop", start + MS, start + 9 * MS),
        Span("sample", Category.OWN, "step loop", start + 9 * MS, start + 10 * MS),
        *inner,
    ]
    if wait_ms:
        spans.append(Span("waiting", Category.QUEUE, "queue", start - wait_ms * MS, start))
    return TracedStep(tuple(spans))


def span_in(number: int, name: str, category: Category, track: str, start_ms: float,
            end_ms: float, **args: int | float | str) -> Span:  # fmt: skip
    """Of step `number` of `traced_step`, in milliseconds from its beginning."""
    start = START_NS + number * 10 * MS
    return Span(name, category, track, start + int(start_ms * MS), start + int(end_ms * MS), args)
