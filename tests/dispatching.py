"""A dispatcher over the tiny model and a simulated NPU, with a clock that a test sets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from engine.cost_profile import CostProfile
from engine.device_board import DeviceBoard, DeviceReport, LaneReport
from engine.dispatcher import Dispatcher, NpuPolicy
from engine.errors import DeviceError, EngineError
from engine.lane import CpuLane
from engine.model_runner import ModelRunner
from engine.npu.fault_memory import FaultMemory
from engine.npu.guarded_lane import GuardedLane
from engine.npu.lease import NoLease
from engine.npu.opener import NpuOpener, OpenedNpu, OpenNpu
from tests.loaded_model import LoadedModel
from tests.simulated_lane import Device, opening, profile


@dataclass
class Clock:
    """`tick_s` passes with every look at it."""

    now_s: float = 1_000.0
    tick_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


class InlineOpener(NpuOpener):
    """Opens at once, in the caller's thread; `failures` are raised first, one at each opening."""

    def __init__(self, open_npu: OpenNpu) -> None:
        super().__init__(open_npu, lambda phase: None)
        self.failures: list[EngineError] = []
        self.num_opened = 0

    def begin(self) -> None:
        self._done.clear()
        if self.failures:
            self._result = self.failures.pop(0)
            self._done.set()
        else:
            self.num_opened += 1
            self._run()


@dataclass
class Rig:
    """`model` is the tiny model with the dispatcher as its runner, ready for `engine_rig.serve`."""

    model: LoadedModel
    dispatcher: Dispatcher
    device: Device
    opener: InlineOpener
    clock: Clock
    reports: list[DeviceReport] = field(default_factory=list)

    @property
    def lane(self) -> LaneReport:
        return self.reports[-1].lanes[0]

    @property
    def states(self) -> list[str]:
        """Of the NPU, as they were declared."""
        return [report.lanes[0].state for report in self.reports]

    def steps(self, name: str) -> int:
        return next(lane.num_steps for lane in self.dispatcher.usage.lanes if lane.name == name)

    def close(self) -> None:
        self.dispatcher.close()


def make_rig(
    model: LoadedModel,
    device_lane: CpuLane,
    device: Device | None = None,
    costs: CostProfile | None = None,
    policy: NpuPolicy | None = None,
    lease: AbstractContextManager[None] | None = None,
    memory: FaultMemory | None = None,
    open_npu: Callable[[Callable[[str], None]], OpenedNpu] | None = None,
    wrap: Callable[[Any], Any] = lambda runner: runner,
) -> Rig:
    """Nothing is opened yet. `device_lane` computes for the simulated device."""
    num_layers = model.config.num_layers
    device = device or Device(num_layers)
    costs = costs or profile(num_layers)
    cpu_lane = GuardedLane(model.lane, num_layers)
    assert isinstance(model.runner, ModelRunner)
    runner = ModelRunner(cpu_lane, model.attention, model.runner.embedding, model.cache)
    opener = InlineOpener(open_npu or opening(device_lane, device, costs))
    lanes = (LaneReport("npu", "closed"), LaneReport("cpu", "open"))
    board = DeviceBoard(DeviceReport("npu", "for a test", lanes))
    clock = Clock()
    dispatcher = Dispatcher(
        runner,
        runner,
        lambda: cpu_lane,
        "npu",
        opener,
        board,
        policy or NpuPolicy(is_strict=False),
        lease or NoLease(),
        memory=memory,
        clock=clock,
    )
    rig = Rig(replace(model, runner=wrap(dispatcher)), dispatcher, device, opener, clock)
    board.subscribe(rig.reports.append)
    return rig


LOST = DeviceError("QNN_COMMON_ERROR_SYSTEM_COMMUNICATION")
