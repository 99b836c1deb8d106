"""A trace in one table: the mean step of each kind, and what it is spent on. Pure."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from engine.span import Category
from server.bench.report import MISSING, TextTable, number
from server.bench.trace_file import Step, StepKind, TraceFile

Value = Callable[[Step], float]


def summary_table(trace: TraceFile) -> TextTable:
    """Shares are of the mean step; threads that work side by side count as one."""
    kinds = [kind for kind in StepKind if trace.of(kind)]
    rows = [
        ("steps", *(f"{len(trace.of(kind))}" for kind in kinds)),
        ("tokens a step", *(number(_mean(trace, k, lambda s: s.number("tokens"))) for k in kinds)),
        ("mean step", *(_ms(_mean(trace, kind, _whole)) for kind in kinds)),
    ]
    for label, value in _PARTS:
        cells = [_part(trace, kind, value) for kind in kinds]
        if any(cell != MISSING for cell in cells):
            rows.append((label, *cells))
    waits_s = [event.seconds for event in trace.queued]
    if waits_s:
        cells = [_ms(fmean(waits_s)) if kind is StepKind.PROMPT else "" for kind in kinds]
        rows.append((f"waiting of {len(waits_s)} requests", *cells))
    return TextTable(_title(trace), ("", *map(str, kinds)), tuple(rows))


def _title(trace: TraceFile) -> str:
    about = trace.about
    threads = f", {about['num_threads']} threads" if about.get("num_threads") else ""
    where = f"{about.get('model', 'a model')} on {about.get('device', 'a device')}"
    return f"{len(trace.steps)} steps of {where}{threads}"


def _whole(step: Step) -> float:
    return step.event.seconds


def _mean(trace: TraceFile, kind: StepKind, value: Value) -> float:
    return fmean(value(step) for step in trace.of(kind))


def _part(trace: TraceFile, kind: StepKind, value: Value) -> str:
    seconds, whole_s = _mean(trace, kind, value), _mean(trace, kind, _whole)
    return f"{_ms(seconds)}  {seconds / whole_s:.1%}" if seconds > 0 and whole_s > 0 else MISSING


def _ms(seconds: float) -> str:
    return f"{number(1e3 * seconds)} ms"


def _rest_of_execution(step: Step) -> float:
    known_s = step.matrix_s + step.seconds(Category.ATTENTION, Category.WAIT)
    return max(0.0, step.phase_s("execute") - known_s)


_PARTS: tuple[tuple[str, Value], ...] = (
    ("schedule, build", lambda step: step.phase_s("schedule") + step.phase_s("build")),
    ("matrices and norms", lambda step: step.matrix_s),
    ("  in NPU calls", lambda step: step.seconds(Category.NPU_CALL)),
    ("attention", lambda step: step.seconds(Category.ATTENTION)),
    ("waiting at barriers", lambda step: step.seconds(Category.WAIT)),
    ("rest of the execution", _rest_of_execution),
    ("sample", lambda step: step.phase_s("sample")),
    ("commit, propose", lambda step: step.phase_s("commit") + step.phase_s("propose")),
)
