"""From a trace of real steps (Chrome's trace event format) to the facts of a mean step. Pure.

Reads complete events (`ph` "X", times in microseconds). What an event is comes from its category,
or, where that says nothing, its name. Threads that work side by side count as one: their mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from server.bench.explanation import Facts


class Part(StrEnum):
    STEP = "step"
    QUEUE = "queue"
    NPU = "npu"
    ATTENTION = "attention"
    OWN = "own work"
    MODEL = "model"


_PARTS = {
    Part.STEP: {"step"},
    Part.QUEUE: {"queue", "queue time"},
    Part.NPU: {"npu", "npu-emulated"},
    Part.ATTENTION: {"attention", "rope and write"},
    Part.OWN: {"schedule", "build", "batch", "sample", "commit", "propose"},
    Part.MODEL: {"segment", "norm", "qkv", "quantize", "output", "gate and up", "down", "head",
                 "logits", "execute"},
}  # fmt: skip
_PART_OF = {word: part for part, words in _PARTS.items() for word in words}


class NotATrace(ValueError):
    """The message is one line and says what is wrong with the file."""


def part_of(event: Mapping[str, Any]) -> Part | None:
    """A segment on the NPU is an NPU call, whatever it is called."""
    arguments = event.get("args") or {}
    if str(arguments.get("lane", "")).startswith("npu"):
        return Part.NPU
    for text in (str(event.get("cat") or ""), str(event.get("name") or "")):
        for word in (text.lower(), text.lower().partition(" ")[0]):
            if word in _PART_OF:
                return _PART_OF[word]
    return None


def events_of(document: object) -> list[Mapping[str, Any]]:
    """The complete events. Raises NotATrace."""
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise NotATrace("it has no traceEvents")
    complete: list[Mapping[str, Any]] = [
        e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e
    ]
    if not complete:
        raise NotATrace("it has no complete events (ph X with a dur)")
    return complete


def trace_facts(document: object, limits: Mapping[str, Any] | None = None) -> Facts:
    """Of the mean step. `limits`: bytes, operations and what the machine can do, as in `Facts`.

    Raises NotATrace.
    """
    events = events_of(document)
    steps = [event for event in events if part_of(event) is Part.STEP]
    if not steps:
        raise NotATrace("it has no step")
    count = len(steps)
    step_s = _seconds(steps) / count
    means = {part: _busy_s([e for e in events if part_of(e) is part]) / count for part in Part}
    npu = [event for event in events if part_of(event) is Part.NPU]
    queues = [event for event in events if part_of(event) is Part.QUEUE]
    return Facts(
        f"the mean of {count} steps",
        step_s,
        own_s=means[Part.OWN],
        queue_s=_seconds(queues) / len(queues) if queues else None,
        attention_s=means[Part.ATTENTION] or None,
        npu_s=means[Part.NPU] or None,
        num_npu_calls=len(npu) / count,
        **(limits or {}),
    )


def _seconds(events: Iterable[Mapping[str, Any]]) -> float:
    return sum(float(event["dur"]) for event in events) / 1e6


def _busy_s(events: list[Mapping[str, Any]]) -> float:
    threads = {(event.get("pid"), event.get("tid")) for event in events}
    return _seconds(events) / len(threads) if threads else 0.0
