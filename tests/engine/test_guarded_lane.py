"""It measures, watches and says which segment failed; what it computes is untouched."""

from __future__ import annotations

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.errors import DeviceLost
from engine.lane import CpuLane, head
from engine.npu.guarded_lane import GuardedLane, LaneFailed
from engine.npu.watchdog import Watchdog
from tests.batches import int32
from tests.simulated_lane import Device, Faults, Place, SimulatedLane, raising

LAYERS = 2


@pytest.fixture(scope="module")
def cpu_lane(tiny_bundle: Bundle) -> CpuLane:
    return CpuLane(tiny_bundle.config, tiny_bundle.path, 32, 8, 1)


class Recorder(Watchdog):
    """Remembers what was watched; nothing ever hangs."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def enter(self, what: str) -> None:
        self.seen.append(what)

    def leave(self) -> None:
        self.seen.append("left")


def run_step(lane: GuardedLane, num_tokens: int) -> np.ndarray:
    buffers = lane.begin(num_tokens)
    buffers.hidden[:] = 0.5
    for index in range(LAYERS):
        lane.run(index)
        buffers.attention[:] = 0.25
    return head(lane, int32([0])).copy()


def test_it_computes_the_same_and_counts_the_calls(cpu_lane: CpuLane) -> None:
    watchdog = Recorder()
    lane = GuardedLane(cpu_lane, LAYERS, watchdog)
    expected = run_step(GuardedLane(cpu_lane, LAYERS), 5)
    assert np.array_equal(run_step(lane, 5), expected)
    twin = lane.twin()
    twin.begin(3)
    twin.run(1)
    taken = {(kind, rows): calls for kind, rows, seconds, calls in lane.meter.take()}
    assert taken == {("first", 5): 1, ("middle", 5): 1, ("middle", 3): 1, ("last", 1): 1,
                     ("head", 1): 1}  # fmt: skip
    assert lane.meter.take() == []
    assert watchdog.seen[::2] == [
        f"{what} on cpu"
        for what in (
            "first segment 0", "middle segment 1", "last segment 2", "head segment 3",
            "middle segment 1",
        )
    ]  # fmt: skip
    assert set(watchdog.seen[1::2]) == {"left"}


@pytest.mark.parametrize("segment", range(LAYERS + 2))
def test_an_error_says_where_it_came_from_and_the_call_is_no_longer_watched(
    cpu_lane: CpuLane, segment: int
) -> None:
    cause = DeviceLost("SSR")
    device = Device(LAYERS, faults=Faults(Place(segment), raising(cause)))
    watchdog = Recorder()
    lane = GuardedLane(SimulatedLane(cpu_lane, device), LAYERS, watchdog)
    with pytest.raises(LaneFailed, match="SSR") as caught:
        run_step(lane, 4)
    error = caught.value
    assert (error.lane, error.segment, error.cause) == ("npu", segment, cause)
    assert watchdog.seen[-1] == "left"
    assert len(lane.meter.take()) == segment, "a call that failed has no price"
