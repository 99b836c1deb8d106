"""Which device runs what, and why: pure decisions over what was asked, found and measured.

What never moves: softmax, RoPE, the pages, sampling and everything whose shape changes from step
to step stay on the CPU, next to the pages (irregular access, no static shape). What is placed is
matrix work: each kind of segment at each number of rows goes where the measured cost, with the
cost of moving the residual there, is least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from engine.cost_profile import FIRST, HEAD, KINDS, LAST, MIDDLE, CostProfile
from engine.errors import DeviceUnavailable

AUTO, CPU, NPU, EMULATED = DEVICES = ("auto", "cpu", "npu", "npu-emulated")

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of rows that decisions are made for; another number counts as the next larger one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a device can be used, and a sentence that says why or why not."""

    is_found: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """`device` is what shall do the matrix work where it pays: "cpu", "npu" or "npu-emulated".

    `is_strict`: the user named it, so nothing else may take its place. `reason` is shown once in
    the log and on `/health`.
    """

    device: str
    reason: str
    is_strict: bool = True

    @property
    def wants_npu(self) -> bool:
        return self.device != CPU


def place(requested: str, npu: Finding, emulator: Finding) -> Placement:
    """Raises DeviceUnavailable when what was asked for by name is not there."""
    if requested == CPU:
        return Placement(CPU, "asked for with --device cpu")
    if requested == AUTO:
        if npu.is_found:
            return Placement(NPU, f"chosen automatically: {npu.reason}", is_strict=False)
        return Placement(CPU, f"chosen automatically: {npu.reason}", is_strict=False)
    if requested == NPU and not npu.is_found:
        raise DeviceUnavailable(
            f"--device npu: {npu.reason}; use --device auto or cpu, or see what hexlm doctor finds"
        )
    if requested == EMULATED and not emulator.is_found:
        raise DeviceUnavailable(f"--device npu-emulated: {emulator.reason}; use --device cpu")
    if requested not in DEVICES:
        raise DeviceUnavailable(f"unknown device {requested!r}: use one of {', '.join(DEVICES)}")
    found = npu if requested == NPU else emulator
    return Placement(requested, f"asked for with --device {requested}; {found.reason}")


@dataclass(frozen=True, slots=True)
class SegmentRoute:
    """Who runs segment 0, and who runs 1 to L - 1."""

    first: str
    middle: str


@dataclass(frozen=True, slots=True)
class RowRoute:
    """Who runs segment L, and who runs the head. The rows are gathered for them anyway."""

    last: str
    head: str


Cost = Callable[[str, str, int], float]
"""(lane, kind of segment, number of rows) → seconds of one call."""


def segment_route_s(
    route: SegmentRoute, num_tokens: int, profile: CostProfile, cost: Cost
) -> float:
    """Seconds of segments 0 to L - 1 of a step, without attention."""
    seconds = cost(route.first, FIRST, num_tokens)
    seconds += (profile.num_layers - 1) * cost(route.middle, MIDDLE, num_tokens)
    return seconds if route.first == route.middle else seconds + profile.copy_s(num_tokens)


def row_route_s(route: RowRoute, num_rows: int, profile: CostProfile, cost: Cost) -> float:
    """Seconds of segment L and the head."""
    seconds = cost(route.last, LAST, num_rows) + cost(route.head, HEAD, num_rows)
    return seconds if route.last == route.head else seconds + profile.copy_s(num_rows)


def segment_routes(lanes: Sequence[str]) -> tuple[SegmentRoute, ...]:
    """All there are, those without a change of lanes first."""
    return tuple(SegmentRoute(*pair) for pair in _pairs(lanes))


def row_routes(lanes: Sequence[str]) -> tuple[RowRoute, ...]:
    return tuple(RowRoute(*pair) for pair in _pairs(lanes))


def _pairs(lanes: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [(first, second) for first in lanes for second in lanes]
    return sorted(pairs, key=lambda pair: pair[0] != pair[1])


@dataclass(frozen=True, slots=True)
class LaneTable:
    """(kind of segment, bucket of rows) → lane, and the table in words."""

    lanes: dict[tuple[str, int], str]
    reason: str


def lane_table(profile: CostProfile, npu: str, max_rows: int = ROW_BUCKETS[-1]) -> LaneTable:
    """The plan from measured costs alone, for every bucket up to `max_rows`.

    A step of T tokens and T rows whose matrix work takes the CPU's own form less time than the
    best division among lanes is the CPU's altogether.
    """
    lanes = tuple(name for name in (CPU, npu) if name in profile.lanes)

    def measured(lane: str, kind: str, num_rows: int) -> float:
        return profile.lanes[lane].seconds(kind, num_rows)

    table: dict[tuple[str, int], str] = {}
    for rows in (bucket for bucket in ROW_BUCKETS if bucket <= max(1, max_rows)):
        segments = min(
            segment_routes(lanes), key=lambda r: segment_route_s(r, rows, profile, measured)
        )
        last = min(row_routes(lanes), key=lambda r: row_route_s(r, rows, profile, measured))
        divided_s = segment_route_s(segments, rows, profile, measured)
        divided_s += row_route_s(last, rows, profile, measured)
        choices = (segments.first, segments.middle, last.last, last.head)
        if profile.cpu_step_s(rows, rows) < divided_s:
            choices = (CPU, CPU, CPU, CPU)
        table.update({(kind, rows): lane for kind, lane in zip(KINDS, choices, strict=True)})
    return LaneTable(table, _in_words(table, profile))


def bucket_of(num_rows: int) -> int:
    """The bucket that a number of rows counts to; the largest one beyond all."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= num_rows), ROW_BUCKETS[-1])


def _in_words(table: dict[tuple[str, int], str], profile: CostProfile) -> str:
    """Such as: middle: cpu from 1 (1 row: npu 1.9 ms), npu from 16 (16 rows: npu 2.3 ms); …"""
    buckets = [rows for kind, rows in table if kind == MIDDLE]
    steps = ", ".join(f"{n}: {profile.cpu_step_s(n, n) * 1e3:.3g} ms" for n in buckets)
    kinds = "; ".join(_kind_in_words(kind, buckets, table, profile) for kind in KINDS)
    return f"{kinds}; a whole step on the cpu takes {steps}"


def _kind_in_words(
    kind: str, buckets: list[int], table: dict[tuple[str, int], str], profile: CostProfile
) -> str:
    runs = [
        (lane, list(group)) for lane, group in groupby(buckets, key=lambda rows: table[kind, rows])
    ]
    if len(runs) == 1:
        return f"{kind}: {runs[0][0]} ({_costs_at(kind, buckets[-1], profile)})"
    parts = [
        f"{lane} from {group[0]} ({_costs_at(kind, group[0], profile)})" for lane, group in runs
    ]
    return f"{kind}: {', '.join(parts)}"


def _costs_at(kind: str, rows: int, profile: CostProfile) -> str:
    costs = ", ".join(
        f"{name} {lane.seconds(kind, rows) * 1e3:.3g} ms" for name, lane in profile.lanes.items()
    )
    return f"{rows} {'row' if rows == 1 else 'rows'}: {costs}"


def place_on_cpu(requested: str, what: str) -> Placement:
    """For `what` has no form for an NPU. Raises DeviceUnavailable when one was asked for."""
    if requested in (NPU, EMULATED):
        raise DeviceUnavailable(
            f"--device {requested}: {what} run on the CPU only: use --device auto or cpu"
        )
    return place(requested, Finding(False, f"{what} run on the CPU"), Finding(False, ""))
