"""What QNN measures of its own calls: the file that the provider writes, merged into a trace.

With its options `profiling_level` and `profiling_file_path` the provider appends rows of
comma-separated values to the file after every call:

    Msg Timestamp,Message,Time,Unit of Measurement,Timing Source,Event Level,Event Identifier
    0,BACKEND,0,COUNT,BACKEND,ROOT,Number of HVX threads used
    0,NODE,357990,CYCLES,BACKEND,SUB-EVENT,segment_001_t8/MatMulNBits_10:OpId_97 (cycles)
    0,BACKEND,141914,US,BACKEND,ROOT,Accelerator (execute) time
    0,EXECUTE,141960,US,BACKEND,ROOT,QNN (execute) time

The rows have durations but no times of day (the first column is 0 or UNKNOWN), so what is new in
the file after a call belongs to that call, and lies somewhere within it. Knows no provider.
"""

from __future__ import annotations

import csv
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.attention import Attend
from engine.batch import Batch
from engine.buckets import Piece
from engine.model_runner import StepLanes
from engine.recorder import NO_RECORDER, Phases, Recorder
from engine.span import Argument, Category, Span
from engine.step_form import NO_PROFILE, CallProfile

logger = logging.getLogger(__name__)

TRACK = "npu (QNN)"

_NUM_COLUMNS = 7
_HEADER = "Msg Timestamp"


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """`message`: EXECUTE, BACKEND, NODE …; `unit`: US, CYCLES, COUNT …; `identifier`: of what."""

    message: str
    value: int
    unit: str
    identifier: str


def parse_rows(text: str) -> list[ProfileRow]:
    """Rows that are none are left out. Columns that a later provider adds are not read."""
    rows = []
    for cells in csv.reader(text.splitlines()):
        if len(cells) < _NUM_COLUMNS or cells[0] == _HEADER or not cells[2].strip().isdecimal():
            continue
        rows.append(ProfileRow(cells[1], int(cells[2]), cells[3], cells[6]))
    return rows


def call_spans(rows: Sequence[ProfileRow], start_ns: int, end_ns: int) -> list[Span]:
    """The spans of one call that took from `start_ns` to `end_ns`: none if nothing was measured.

    What contains what follows from the durations: each lies in the middle of the next longer one.
    The nodes of the graph fill the innermost one, in their order and by their cycles. Counts, and
    times of other things than executing, are arguments of the outermost.
    """
    times = sorted((row for row in rows if _is_execution(row)), key=lambda row: -row.value)
    others: dict[str, Argument] = {
        row.identifier: row.value
        for row in rows
        if row.message != "NODE" and not (row.unit == "US" and _is_execution(row))
    }
    spans: list[Span] = []
    for row in times:
        duration_ns = min(1000 * row.value, end_ns - start_ns)
        start_ns += (end_ns - start_ns - duration_ns) // 2
        end_ns = start_ns + duration_ns
        name = _without_unit(row.identifier) if row.identifier != "NULL" else "QNN (execute) time"
        args = {} if spans else others
        spans.append(Span(name, Category.QNN, TRACK, start_ns, end_ns, args))
    return spans + list(_node_spans(rows, start_ns, end_ns)) if spans else []


def _is_execution(row: ProfileRow) -> bool:
    return row.unit == "US" and (row.message == "EXECUTE" or "(execute)" in row.identifier)


def _node_spans(rows: Sequence[ProfileRow], start_ns: int, end_ns: int) -> Iterator[Span]:
    nodes = [row for row in rows if row.message == "NODE" and row.value > 0]
    total, done = sum(row.value for row in nodes), 0
    for row in nodes:
        begin, done = done, done + row.value
        yield Span(
            _without_unit(row.identifier),
            Category.QNN,
            TRACK,
            start_ns + begin * (end_ns - start_ns) // total,
            start_ns + done * (end_ns - start_ns) // total,
            {row.unit.lower(): row.value},
        )


def _without_unit(identifier: str) -> str:
    return identifier.removesuffix(" (cycles)")


class QnnProfile:
    """The file that sessions write to, until `close` or the end of the process. A `CallProfile`."""

    def __init__(self, level: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hexlm-qnn-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._path = self._folder / "profile.csv"
        self._read_bytes = 0
        self.provider_options = {
            "profiling_level": level,
            "profiling_file_path": str(self._path),
        }

    def beside(self, recorder: Recorder) -> Recorder:
        if recorder is NO_RECORDER:
            return recorder
        self.take()  # what was before the trace
        return _ProfiledRecorder(recorder, self)

    def take(self) -> list[ProfileRow]:
        """What was written since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                added = file.read()
        except FileNotFoundError:  # nothing was opened or called yet
            return []
        self._read_bytes += len(added)
        return parse_rows(added.decode("utf-8", errors="replace"))

    def close(self) -> None:
        self._remove()


def open_profile(level: str) -> tuple[CallProfile, dict[str, str]]:
    """Where a device's own measurements go, and the provider's options for it; "" for none."""
    if not level:
        return NO_PROFILE, {}
    profile = QnnProfile(level)
    logger.warning(
        "QNN profiles every call (%s): that costs time, and a file that grows until the engine "
        "ends; turn it off with [npu] profiling = \"\"", level,
    )  # fmt: skip
    return profile, profile.provider_options


class _ProfiledRecorder:
    """A `Recorder` that hands everything on, and each call's measurements after the call."""

    def __init__(self, recorder: Recorder, profile: QnnProfile) -> None:
        self._recorder = recorder
        self._profile = profile

    def add(self, span: Span) -> None:
        self._recorder.add(span)

    def now_ns(self) -> int:
        return self._recorder.now_ns()

    def ended(self, name: str, category: Category, track: str, start_ns: int) -> None:
        self._recorder.ended(name, category, track, start_ns)

    def called(self, graph: str, track: str, start_ns: int, piece: Piece, num_bytes: int) -> None:
        end_ns = self._recorder.now_ns()
        self._recorder.called(graph, track, start_ns, piece, num_bytes)
        for span in call_spans(self._profile.take(), start_ns, end_ns):
            self._recorder.add(span)

    def ran(
        self, phases: Phases, ticks: NDArray[np.int64], num_threads: int, start_s: float
    ) -> None:
        self._recorder.ran(phases, ticks, num_threads, start_s)

    def lanes(self, lanes: StepLanes) -> StepLanes:
        return self._recorder.lanes(lanes)

    def attend(self, attend: Attend, batch: Batch) -> Attend:
        return self._recorder.attend(attend, batch)
