"""Which device runs what: explained, refused if it is not there, and from recorded costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.cost_profile import FIRST, HEAD, KINDS, LAST, MIDDLE, CostProfile, LaneCosts, Points
from engine.errors import DeviceUnavailable
from engine.placement import (
    ROW_BUCKETS,
    Finding,
    Placement,
    SegmentRoute,
    bucket_of,
    lane_table,
    place,
    place_on_cpu,
    segment_route_s,
)
from tests.simulated_lane import flat, profile

NOT_FOUND = Finding(False, "the package onnxruntime-qnn is not installed")
NPU = Finding(True, "the QNN provider lists a Hexagon NPU")
EMULATOR = Finding(True, "onnxruntime-qnn emulates it")


def test_cpu_is_given_to_who_asks_for_it() -> None:
    assert place("cpu", NPU, EMULATOR) == Placement("cpu", "asked for with --device cpu")


def test_auto_says_why_it_is_the_cpu() -> None:
    assert place("auto", NOT_FOUND, EMULATOR) == Placement(
        "cpu",
        "chosen automatically: the package onnxruntime-qnn is not installed",
        is_strict=False,
    )


def test_auto_takes_an_npu_and_lets_the_cpu_help() -> None:
    found = place("auto", NPU, EMULATOR)
    assert found == Placement(
        "npu", "chosen automatically: the QNN provider lists a Hexagon NPU", is_strict=False
    )
    assert found.wants_npu and not place("cpu", NPU, EMULATOR).wants_npu


def test_what_is_asked_for_by_name_is_what_it_will_be() -> None:
    assert place("npu", NPU, NOT_FOUND).is_strict
    assert place("npu-emulated", NOT_FOUND, EMULATOR).device == "npu-emulated"
    assert "asked for with --device npu; the QNN" in place("npu", NPU, NOT_FOUND).reason


def test_npu_is_refused_with_what_was_found() -> None:
    refused = f"--device npu: {NOT_FOUND.reason}; use --device auto"
    with pytest.raises(DeviceUnavailable, match=refused):
        place("npu", NOT_FOUND, EMULATOR)
    with pytest.raises(DeviceUnavailable, match=f"--device npu-emulated: {NOT_FOUND.reason}"):
        place("npu-emulated", NPU, NOT_FOUND)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    known = "auto, cpu, npu, npu-emulated"
    with pytest.raises(DeviceUnavailable, match=f"unknown device 'gpu': use one of {known}"):
        place("gpu", NPU, EMULATOR)


def test_what_runs_on_the_cpu_only_says_so() -> None:
    assert place_on_cpu("auto", "embedding models") == Placement(
        "cpu", "chosen automatically: embedding models run on the CPU", is_strict=False
    )
    assert place_on_cpu("cpu", "embedding models").reason == "asked for with --device cpu"
    with pytest.raises(DeviceUnavailable, match="embedding models run on the CPU only"):
        place_on_cpu("npu", "embedding models")


# Recorded shapes of cost, milliseconds a call. A CPU streams the weights for one row and computes
# for many; an NPU pays for its call and its bucket.


def cpu_like(one_row_ms: float, each_row_ms: float) -> Points:
    counts = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    return tuple((n, max(one_row_ms, each_row_ms * n) / 1e3) for n in counts)


def npu_like(bucket_ms: dict[int, float]) -> Points:
    return tuple((n, ms / 1e3) for n, ms in bucket_ms.items())


CPU_COSTS = LaneCosts(
    1e-5,
    {
        FIRST: cpu_like(0.3, 0.05),
        MIDDLE: cpu_like(1.2, 0.2),
        LAST: cpu_like(1.0, 0.15),
        HEAD: cpu_like(6.0, 1.0),
    },
    is_bucketed=False,
)
SLOW_CALLS = {1: 1.9, 8: 2.0, 32: 2.3, 128: 3.9}
FAST_CALLS = {1: 0.5, 8: 0.55, 32: 0.7, 128: 1.8}


def npu_costs(calls: dict[int, float], head: dict[int, float]) -> LaneCosts:
    points = npu_like(calls)
    segments = {FIRST: points, MIDDLE: points, LAST: points, HEAD: npu_like(head)}
    return LaneCosts(1.9e-4, segments, is_bucketed=True)


def machine(npu: LaneCosts | None) -> CostProfile:
    """The CPU's own form takes a step no less time than its lane."""
    lanes = {"cpu": CPU_COSTS} | ({"npu": npu} if npu else {})
    steps = tuple((n, cpu_step_s(n)) for n in ROW_BUCKETS)
    return replace(profile(16), lanes=lanes, cpu_step=steps, cpu_rows=flat(1e-9))


def cpu_step_s(num_rows: int) -> float:
    first, middle, last, head = (CPU_COSTS.seconds(kind, num_rows) for kind in KINDS)
    return first + 15 * middle + last + head


FAST = machine(npu_costs(FAST_CALLS, {1: 3.0, 8: 3.2, 32: 5.0}))
SLOW = machine(npu_costs(SLOW_CALLS, {1: 9.0, 8: 9.5, 32: 14.0}))
NONE = machine(None)


def choices(costs: CostProfile, kind: str) -> dict[int, str]:
    table = lane_table(costs, "npu").lanes
    return {rows: lane for (k, rows), lane in table.items() if k == kind}


def test_a_fast_npu_gets_everything_from_the_first_token() -> None:
    assert set(choices(FAST, MIDDLE).values()) == {"npu"}
    assert set(choices(FAST, HEAD).values()) == {"npu"}


def test_a_slow_npu_gets_what_is_above_the_crossover_and_no_small_head() -> None:
    middle = choices(SLOW, MIDDLE)
    assert [rows for rows, lane in middle.items() if lane == "cpu"] == [1, 2, 4, 8]
    assert {middle[rows] for rows in (16, 32, 128, 512)} == {"npu"}
    head = choices(SLOW, HEAD)
    assert head[1] == head[8] == "cpu" and head[16] == head[32] == "npu"


def test_without_an_npu_everything_is_the_cpus() -> None:
    assert set(lane_table(NONE, "npu").lanes.values()) == {"cpu"}


def test_small_steps_are_the_cpus_when_its_own_form_is_faster_than_any_division() -> None:
    """With kernels of its own the CPU is faster than its lane; only the NPU's lane is measured."""
    own_form = tuple((n, cpu_step_s(n) / 3) for n in ROW_BUCKETS)
    costs = replace(SLOW, cpu_step=own_form, lanes={"npu": SLOW.lanes["npu"]})
    middle = choices(costs, MIDDLE)
    assert [rows for rows, lane in middle.items() if lane == "cpu"] == [1, 2, 4, 8, 16, 32, 64]
    assert choices(costs, HEAD)[64] == "cpu" and choices(costs, HEAD)[128] == "npu"


def test_the_plan_is_explained_with_numbers() -> None:
    reason = lane_table(SLOW, "npu").reason
    assert "middle: cpu from 1 (1 row: cpu 1.2 ms, npu 1.9 ms), npu from 16 (16 rows:" in reason
    assert "head: cpu from 1 (1 row: cpu 6 ms, npu 9 ms), npu from 16" in reason
    assert lane_table(NONE, "npu").reason.startswith("first: cpu (512 rows: cpu 25.6 ms)")


def test_a_change_of_lanes_must_pay_for_its_copy() -> None:
    """The first segment would be a little cheaper elsewhere, but the residual must come back."""

    def costs(copy_bytes_per_s: float) -> CostProfile:
        first_is_cheap = replace(CPU_COSTS, segments={**CPU_COSTS.segments, FIRST: flat(0.45e-3)})
        lanes = {"cpu": first_is_cheap, "npu": FAST.lanes["npu"]}
        return replace(FAST, lanes=lanes, copy_bytes_per_s=copy_bytes_per_s)

    assert choices(costs(1e12), FIRST)[1] == "cpu"
    assert choices(costs(1e6), FIRST)[1] == "npu"
    assert choices(costs(1e12), MIDDLE)[1] == "npu"
    seconds = segment_route_s(
        SegmentRoute("cpu", "npu"), 1, costs(1e6), lambda lane, kind, rows: 1.0
    )
    assert seconds == pytest.approx(16 + 64 * 4 / 1e6)


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (128, 128), (129, 256), (900, 512)])
def test_the_bucket_of_a_number_of_rows(rows: int, bucket: int) -> None:
    assert bucket_of(rows) == bucket
