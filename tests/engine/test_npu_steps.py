"""Which way a step goes with an open NPU, and how experience changes it. The clock is a test's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.batch import Batch, Float32Array
from engine.bundle import Bundle
from engine.cost_profile import KINDS, CostProfile, LaneCosts, WholeCosts
from engine.errors import BundleError
from engine.lane import CpuLane, LaneCounters
from engine.model_runner import LaneSteps
from engine.npu import guarded_lane
from engine.npu import steps as npu_steps
from engine.npu.guarded_lane import GuardedLane
from engine.npu.opener import OpenedNpu
from engine.npu.overflow_ledger import WHOLE_STEP
from engine.npu.steps import IN_HALVES, IN_ONE_PIECE, ON_CPU, NpuSteps
from engine.observed_costs import EXPLORE_EVERY
from engine.recorder import Recorder
from engine.step_form import NpuForms
from tests.batches import Span, make_batch
from tests.loaded_model import LoadedModel, load_model
from tests.simulated_lane import Device, Faults, SimulatedLane, flat, profile

LAYERS = 2


class FakeTime:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedDevice(Device):
    """Its calls take their time on the test's clock, and none on any other."""

    def __init__(self, clock: FakeTime, seconds: dict[str, float]) -> None:
        super().__init__(LAYERS, faults=Faults())
        self.clock = clock
        self.seconds = seconds

    def call(self, place: Any, num_rows: int, compute: Any) -> None:
        super().call(place, num_rows, compute)
        self.clock.now_s += self.seconds[self._kind(place.segment)]


class TimedForm:
    """The CPU's own form, or one of the NPU for whole steps."""

    counters = LaneCounters()

    def __init__(self, model: LoadedModel, clock: FakeTime, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self.max_tokens = 1_000
        self._model, self._clock = model, clock

    def fits(self, batch: Batch) -> bool:
        return batch.num_tokens <= self.max_tokens

    def execute(self, batch: Batch) -> Float32Array:
        self._clock.now_s += self.seconds
        return self._model.runner.execute(batch)

    def record(self, recorder: Recorder) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTime]:
    clock = FakeTime()
    monkeypatch.setattr(npu_steps, "perf_counter", clock)
    monkeypatch.setattr(guarded_lane, "perf_counter", clock)
    yield clock


@pytest.fixture(scope="module")
def model(tiny_bundle: Bundle) -> LoadedModel:
    return load_model(tiny_bundle)


@pytest.fixture(scope="module")
def device_lane(tiny_bundle: Bundle) -> CpuLane:
    return CpuLane(tiny_bundle.config, tiny_bundle.path, 256, 64, 1)


class Bench:
    """`opened_cpu_lanes` counts how often the CPU's lane had to be opened."""

    def __init__(
        self,
        model: LoadedModel,
        lane: CpuLane,
        clock: FakeTime,
        costs: CostProfile | None,
        cpu_s: float = 4e-3,
        npu_s: float = 1e-3,
        **options: Any,
    ) -> None:
        assert isinstance(model.runner, LaneSteps)
        self.opened_cpu_lanes = 0
        self.model = model
        self.device = TimedDevice(clock, dict.fromkeys(KINDS, npu_s))
        self.cpu = TimedForm(model, clock, "cpu", cpu_s)
        self.fused = TimedForm(model, clock, "npu-fused", 1.0)
        forms = NpuForms(SimulatedLane(lane, self.device), (self.fused,))
        self.steps = NpuSteps(
            model.runner, self.cpu, self._open_cpu_lane, OpenedNpu(forms, costs, "a test"), None,
            **options,
        )  # fmt: skip

    def _open_cpu_lane(self) -> GuardedLane:
        self.opened_cpu_lanes += 1
        return GuardedLane(self.model.lane, LAYERS)

    def go(self, batch: Batch, times: int = 1) -> list[str]:
        names = []
        for _ in range(times):
            way = self.steps.choose(batch)
            self.steps.execute(way, batch)
            names.append(way.name)
        return names


def decode(num_sequences: int = 1) -> Batch:
    return make_batch([Span([1], [i], 3) for i in range(num_sequences)], rows="last")


def known(npu_s: float = 1e-3, cpu_step_s: float = 4e-3) -> CostProfile:
    """Four calls of a step on the NPU, one of the CPU's own form; its lane was not measured."""
    whole = profile(LAYERS, npu_s=npu_s, attention_s=1e-9, handover_s=1.0)
    return replace(whole, cpu_step=flat(cpu_step_s), lanes={"npu": whole.lanes["npu"]})


def test_a_step_goes_where_it_costs_less(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime
) -> None:
    dear = Bench(model, device_lane, clock, known(cpu_step_s=1.0), cpu_s=1.0)
    assert dear.go(decode()) == [IN_ONE_PIECE]
    cheap = Bench(model, device_lane, clock, known(cpu_step_s=1e-3), cpu_s=1e-3)
    assert cheap.go(decode()) == [ON_CPU]
    assert dear.opened_cpu_lanes == cheap.opened_cpu_lanes == 0


def test_all_ways_give_the_same_bits(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime
) -> None:
    in_proportion = LaneCosts(1e-4, dict.fromkeys(KINDS, ((1, 5e-4), (8, 4e-3))), False)
    costs = replace(
        known(),
        handover_s=1e-9,
        decode_attention=flat(1e-3),
        lanes={"npu": in_proportion},
        whole={"npu-fused": WholeCosts(((64, 64, 1e-3),))},
    )
    bench = Bench(model, device_lane, clock, costs)
    batch = decode(4)
    model.logits(*(Span([9, 8, 7], [i]) for i in range(4)))
    expected = model.runner.execute(batch).copy()
    ways = bench.steps._ways(batch)
    assert [way.name for way in ways] == [ON_CPU, IN_ONE_PIECE, IN_HALVES, "npu-fused"]
    for way in ways:
        assert np.array_equal(bench.steps.execute(way, batch), expected)
    bench.steps.close()


def test_what_the_user_named_does_everything_whatever_it_costs(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime
) -> None:
    costs = known(npu_s=1.0, cpu_step_s=1e-6)
    bench = Bench(model, device_lane, clock, costs, may_use_cpu=False)
    assert set(bench.go(decode(), 5)) == {IN_ONE_PIECE}
    unknown = Bench(model, device_lane, clock, None, may_use_cpu=False)
    assert set(unknown.go(decode(), 5)) == {IN_ONE_PIECE}


def test_an_npu_that_becomes_slow_loses_the_steps_and_gets_them_back(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime
) -> None:
    bench = Bench(model, device_lane, clock, known(cpu_step_s=6e-3), cpu_s=6e-3)
    assert bench.go(decode(), 20)[-10:] == [IN_ONE_PIECE] * 10
    bench.device.seconds = dict.fromkeys(KINDS, 5e-3)
    assert bench.go(decode(), 30)[-10:] == [ON_CPU] * 10
    bench.device.seconds = dict.fromkeys(KINDS, 1e-3)
    names = bench.go(decode(), 8 * EXPLORE_EVERY)
    assert names[:50].count(IN_ONE_PIECE) <= 1, "tried now and then, not all the time"
    assert names[-20:].count(IN_ONE_PIECE) >= 19


def test_a_cpu_under_load_loses_its_steps(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime
) -> None:
    bench = Bench(model, device_lane, clock, known(npu_s=2e-3), cpu_s=4e-3, npu_s=2e-3)
    assert bench.go(decode(), 20)[-10:] == [ON_CPU] * 10
    bench.cpu.seconds = 40e-3
    assert bench.go(decode(), 40)[-10:] == [IN_ONE_PIECE] * 10


def test_waiting_for_others_on_the_npu_has_its_price(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime
) -> None:
    bench = Bench(model, device_lane, clock, known(npu_s=0.5e-3), npu_s=0.5e-3)
    assert bench.go(decode(), 20)[-5:] == [IN_ONE_PIECE] * 5
    for _ in range(30):
        bench.steps.observe_wait(20e-3)
    assert bench.go(decode(), 20)[-5:] == [ON_CPU] * 5
    for _ in range(60):
        bench.steps.observe_wait(0.0)
    assert bench.go(decode(), 20)[-5:] == [IN_ONE_PIECE] * 5


def test_the_head_goes_to_the_cpu_where_that_pays_and_only_then_is_its_lane_opened(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime
) -> None:
    costs = known(cpu_step_s=1.0)
    npu = costs.lanes["npu"]
    dear_head = LaneCosts(1e-4, {**npu.segments, "head": flat(50e-3)}, is_bucketed=True)
    cpu = LaneCosts(1e-4, dict.fromkeys(KINDS, flat(2e-3)), is_bucketed=False)
    divided = replace(costs, lanes={"cpu": cpu, "npu": dear_head})
    bench = Bench(model, device_lane, clock, divided, cpu_s=1.0)
    prompt = make_batch([Span([1, 2, 3], [0])], rows="none")
    way = bench.steps.choose(prompt)
    assert way.devices == ("npu",) and bench.opened_cpu_lanes == 0, "a chunk has no head"
    batch = decode(2)
    expected = model.runner.execute(batch).copy()
    way = bench.steps.choose(batch)
    assert way.devices == ("npu", "cpu")
    assert np.array_equal(bench.steps.execute(way, batch), expected)
    bench.go(batch, 3)
    assert bench.opened_cpu_lanes == 1


@pytest.mark.parametrize("banned", [{0}, {1}, {LAYERS}, {LAYERS + 1}, {0, 1, 2, 3}], ids=str)
def test_banned_segments_run_on_the_cpu_within_the_step(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime, banned: set[int]
) -> None:
    bench = Bench(model, device_lane, clock, known(cpu_step_s=1.0), cpu_s=1.0)
    bench.steps.banned = frozenset(banned)
    batch = make_batch([Span([1, 2, 3], [0]), Span([4], [1])], 63)
    expected = model.runner.execute(batch).copy()
    before = bench.device.num_calls
    way = bench.steps.choose(batch)
    assert np.array_equal(bench.steps.execute(way, batch), expected)
    if len(banned) < LAYERS + 2:
        assert bench.device.num_calls - before == LAYERS + 2 - len(banned)
        assert way.devices == ("npu", "cpu")
    else:
        assert way.devices == ("cpu",)


def test_without_a_cpu_lane_a_step_with_banned_segments_is_the_cpus(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime
) -> None:
    bench = Bench(model, device_lane, clock, known(cpu_step_s=1.0), cpu_s=1.0)

    def none() -> GuardedLane:
        bench.opened_cpu_lanes += 1
        raise BundleError("there are no graphs")

    bench.steps._open_cpu_lane = none
    assert bench.go(decode()) == [IN_ONE_PIECE]
    bench.steps.banned = frozenset({1})
    assert set(bench.go(decode(), 3)) == {ON_CPU} and bench.opened_cpu_lanes == 1


def test_a_form_for_whole_steps_is_taken_where_it_fits_and_pays(
    model: LoadedModel, device_lane: CpuLane, clock: FakeTime
) -> None:
    costs = replace(known(), whole={"npu-fused": WholeCosts(((8, 64, 0.5e-3),))})
    bench = Bench(model, device_lane, clock, costs)
    bench.fused.seconds, bench.fused.max_tokens = 0.5e-3, 2
    assert bench.go(decode(2), 20)[-10:] == ["npu-fused"] * 10
    assert "npu-fused" not in bench.go(decode(3), 20)
    bench.steps.banned = frozenset({WHOLE_STEP})
    assert "npu-fused" not in bench.go(decode(2), 20)
    nobody_knows = Bench(model, device_lane, clock, known())
    assert "npu-fused" not in nobody_knows.go(decode(2), 20)
