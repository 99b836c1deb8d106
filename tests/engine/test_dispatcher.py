"""Faults of the NPU at every phase: the answers are those of the CPU undisturbed, to the token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from engine.batch import Batch, Float32Array
from engine.bundle import Bundle
from engine.cost_profile import CostProfile, WholeCosts
from engine.dispatcher import CpuDispatcher, NpuPolicy
from engine.errors import (
    BundleError,
    ContextRejected,
    DeviceError,
    DeviceFull,
    DeviceLost,
    DeviceOverflow,
    DeviceUnavailable,
)
from engine.lane import CpuLane, LaneCounters
from engine.npu.fault_memory import FIRST_BACK_OFF_S, FaultMemory
from engine.npu.opener import NpuOpener, OnPhase, OpenedNpu
from engine.npu.steps import NpuSteps
from engine.recorder import NO_RECORDER, Recorder
from engine.span import Category
from engine.span_recorder import SpanRecorder
from engine.step_form import NpuForms
from scheduler.messages import FinishReason, GenerationRequest
from scheduler.sequence import Sequence
from tests.batches import Span, make_batch
from tests.dispatching import Rig, make_rig
from tests.engine_rig import Reply, Run, greedy_with_logprobs, seeded_with_logprobs, serve
from tests.loaded_model import LoadedModel, load_model, spoil
from tests.simulated_lane import (
    Device,
    Faults,
    Place,
    SimulatedLane,
    opening,
    profile,
    raising,
)
from tests.traces import assert_nested

LAYERS = 2
HEAD = LAYERS + 1
MakeRig = Callable[..., Rig]

REQUESTS = [
    GenerationRequest("greedy", tuple(range(5, 75)), greedy_with_logprobs(12)),
    GenerationRequest("seeded", tuple(range(80, 90)), seeded_with_logprobs(14, seed=4)),
    GenerationRequest("late", tuple(range(100, 140)), greedy_with_logprobs(8)),
]
ARRIVALS = {0: REQUESTS[:2], 4: REQUESTS[2:]}


class Repeats:
    """Proposes the newest token thrice: sometimes right, mostly wrong."""

    def propose(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.draft_token_ids = [sequence.token_ids[-1]] * 3


@pytest.fixture(scope="module")
def model(tiny_bundle: Bundle) -> LoadedModel:
    return load_model(tiny_bundle)


@pytest.fixture(scope="module")
def device_lane(tiny_bundle: Bundle) -> CpuLane:
    return CpuLane(tiny_bundle.config, tiny_bundle.path, 512, 512, 1)


@pytest.fixture(scope="module")
def undisturbed(model: LoadedModel) -> dict[str, tuple[object, ...]]:
    spoil(model.cache)
    return contents(serve(model, ARRIVALS))


@pytest.fixture
def rig_of(model: LoadedModel, device_lane: CpuLane) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(**changes: object) -> Rig:
        spoil(model.cache)
        rigs.append(make_rig(model, device_lane, **changes))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def contents(run: Run) -> dict[str, tuple[object, ...]]:
    return {name: reply.content for name, reply in run.replies.items()}


def faulty(place: Place, error: Exception, nth: int = 0) -> Device:
    return Device(LAYERS, faults=Faults(place, raising(error), nth))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs stay what they are said to be: nothing is learnt from the real times."""
    monkeypatch.setattr(NpuSteps, "_learn", lambda *step: None)


def overlapping() -> CostProfile:
    """Costs with which every step of two tokens is worth cutting."""
    return profile(LAYERS, npu_s=1e-3, cpu_s=1.0, attention_s=1e-3, handover_s=1e-9)


def test_without_faults_the_npu_does_it_all(rig_of: MakeRig, undisturbed: object) -> None:
    rig = rig_of()
    rig.dispatcher.open()
    run = serve(rig.model, ARRIVALS)
    assert contents(run) == undisturbed
    assert rig.steps("npu") == run.num_steps and rig.steps("cpu") == 0
    assert rig.states == ["closed", "opening", "open"]


PLACES = [Place(0), Place(1), Place(LAYERS), Place(HEAD)]
ERRORS = [DeviceLost("SSR"), DeviceError("QNN_COMMON_ERROR"), DeviceFull("1002")]


@pytest.mark.parametrize("nth", [0, 1, 6], ids=["prefill", "mixed", "decode"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_fault_in_any_segment_costs_no_token(
    rig_of: MakeRig, undisturbed: object, place: Place, nth: int
) -> None:
    rig = rig_of(device=faulty(place, DeviceLost("SSR"), nth))
    rig.dispatcher.open()
    run = serve(rig.model, ARRIVALS)
    assert rig.device.faults.num_acted == 1
    assert contents(run) == undisturbed
    assert run.stats.total_failed_steps == 0, "the step loop has seen nothing of it"
    assert rig.states == ["closed", "opening", "open", "closed"]
    assert "DeviceLost: SSR" in rig.lane.detail and "the CPU computes instead" in rig.lane.detail
    assert rig.device.num_closed == 1
    assert rig.steps("npu") == max(nth, 0) and rig.steps("cpu") == run.num_steps - nth


@pytest.mark.parametrize("nth", [0, 3])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_fault_under_drafts_costs_no_token(
    rig_of: MakeRig, undisturbed: object, place: Place, nth: int
) -> None:
    rig = rig_of(device=faulty(place, DeviceLost("SSR"), nth))
    rig.dispatcher.open()
    assert contents(serve(rig.model, ARRIVALS, Repeats())) == undisturbed
    assert rig.device.faults.num_acted == 1


@pytest.mark.parametrize("nth", [0, 2])
@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("is_second", [False, True])
def test_a_fault_in_either_half_costs_no_token(
    rig_of: MakeRig, undisturbed: object, segment: int, is_second: bool, nth: int, told: None
) -> None:
    place = Place(segment, is_second)
    rig = rig_of(device=faulty(place, DeviceLost("SSR"), nth), costs=overlapping())
    rig.dispatcher.open()
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed
    assert rig.device.faults.num_acted == 1
    assert rig.states[-1] == "closed"


def test_overlapping_steps_without_faults_give_the_same_answers(
    rig_of: MakeRig, undisturbed: object, told: None
) -> None:
    seen: list[Place] = []
    device = Device(LAYERS)
    device.faults.pass_by = seen.append  # type: ignore[assignment, method-assign]
    rig = rig_of(device=device, costs=overlapping())
    rig.dispatcher.open()
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed
    assert Place(1, is_second=True) in seen


@pytest.mark.parametrize(
    "error",
    [*ERRORS, ContextRejected("damaged"), DeviceUnavailable("no driver"), BundleError("no graph")],
    ids=lambda error: type(error).__name__,
)
def test_what_fails_at_opening_leaves_the_cpu_at_work(
    rig_of: MakeRig, undisturbed: object, error: Exception
) -> None:
    rig = rig_of()
    rig.opener.failures = [error]  # type: ignore[list-item]
    rig.dispatcher.open()
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed
    assert str(error) in rig.lane.detail and rig.lane.state == "closed"
    assert rig.steps("npu") == 0


def test_the_npu_comes_back_after_its_back_off_and_stays_away_longer_each_time(
    rig_of: MakeRig, undisturbed: object
) -> None:
    rig = rig_of()
    rig.opener.failures = [DeviceLost(f"fault {i}") for i in range(3)]
    rig.dispatcher.open()
    batch = make_batch([Span([1, 2], [0])], 63)
    waits: list[float] = []
    for _ in range(3):
        rig.dispatcher.execute(batch)
        opened_after = 0.0
        while rig.lane.state == "closed":
            rig.clock.now_s += 0.5
            opened_after += 0.5
            rig.dispatcher.execute(batch)
            if rig.lane.state != "closed" or len(rig.opener.failures) < 3 - len(waits) - 1:
                break
        waits.append(opened_after)
    assert waits == [2.0, 4.0, 8.0]
    rig.dispatcher.execute(batch)
    assert rig.lane.state == "open" and rig.opener.num_opened == 1
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed
    assert rig.steps("npu") > 0


def test_a_fault_right_after_reopening_costs_no_token(rig_of: MakeRig, undisturbed: object) -> None:
    acted: list[int] = []

    def act() -> None:
        acted.append(rig.opener.num_opened)
        if len(acted) < 3:
            rig.device.faults.num_passed = 0  # again at the next passing
        raise DeviceLost("again")

    rig = rig_of(device=Device(LAYERS, faults=Faults(Place(1), act)))
    rig.dispatcher.open()
    rig.clock.tick_s = 10.0
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed
    assert acted == [1, 2, 3]
    assert rig.states == ["closed"] + ["opening", "open", "closed"] * 3 + ["opening", "open"]


def test_an_overflow_is_computed_again_and_the_segment_moves_if_it_happens_again(
    rig_of: MakeRig, undisturbed: object
) -> None:
    def overflow() -> None:
        rig.device.faults.num_passed = 0  # as the weights are what they are, every time
        raise DeviceOverflow("segment 1: rows 0, 1")

    rig = rig_of(device=Device(LAYERS, faults=Faults(Place(1), overflow)))
    rig.dispatcher.open()
    run = serve(rig.model, ARRIVALS)
    assert contents(run) == undisturbed
    assert rig.device.faults.num_acted == 2, "from then on the CPU has it"
    assert rig.lane.state == "open" and "segments 1 on the CPU" in rig.lane.detail
    assert rig.steps("npu") == run.num_steps - 2 and rig.opener.num_opened == 1
    assert set(rig.dispatcher.usage.devices) == {"npu", "cpu"}


def test_a_device_on_which_everything_overflows_is_closed_for_long(rig_of: MakeRig) -> None:
    rig = rig_of(device=faulty(Place(0), DeviceOverflow("rows 0")))
    rig.dispatcher.open()
    batch = make_batch([Span([1, 2], [0])], 63)
    for segment in (0, 0, 1, 1):
        rig.device.faults.place, rig.device.faults.num_passed = Place(segment), 0
        rig.dispatcher.execute(batch)
    assert rig.lane.state == "closed"
    assert "fp16 overflow in 2 of 4 segments" in rig.lane.detail and "300 s" in rig.lane.detail


def told_by(rig: Rig) -> Recorder:
    return rig.device.recorder


def test_a_recorder_hears_of_every_device_also_of_one_that_is_opened_later(
    rig_of: MakeRig,
) -> None:
    rig, recorder = rig_of(), SpanRecorder()
    rig.dispatcher.record(recorder)
    batch = make_batch([Span([1, 2], [0])], 63)

    def lanes_of_a_step() -> set[object]:
        rig.dispatcher.execute(batch)
        return {s.args["lane"] for s in recorder.take().spans if s.category is Category.SEGMENT}

    assert lanes_of_a_step() == {"cpu"}
    rig.dispatcher.open()
    assert lanes_of_a_step() == {"npu"}
    assert told_by(rig) is recorder
    rig.dispatcher.record(NO_RECORDER)
    assert told_by(rig) is NO_RECORDER
    assert lanes_of_a_step() == set()


def test_recording_changes_no_token(
    rig_of: MakeRig, undisturbed: dict[str, tuple[object, ...]]
) -> None:
    rig, recorder = rig_of(costs=overlapping()), SpanRecorder()
    rig.dispatcher.record(recorder)
    rig.dispatcher.open()
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed
    spans = recorder.take().spans
    assert {span.track for span in spans} >= {"lane npu", "attention"}
    assert_nested(spans)


class WholeForm:
    """A form of the NPU for whole steps that fails at its first steps."""

    name = "npu-fused"
    counters = LaneCounters()

    def __init__(self, model: LoadedModel, error: Exception, num_failures: int) -> None:
        self.num_executed = 0
        self._model, self._error, self._num_failures = model, error, num_failures

    def fits(self, batch: Batch) -> bool:
        return True

    def execute(self, batch: Batch) -> Float32Array:
        self.num_executed += 1
        if self.num_executed <= self._num_failures:
            raise self._error
        return self._model.runner.execute(batch)

    def record(self, recorder: Recorder) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "num_executed", "state"),
    [(DeviceOverflow("layers 3 to 8"), 2, "open"), (DeviceLost("SSR"), 1, "closed")],
)
def test_a_fault_of_a_form_for_whole_steps_costs_no_token(
    model: LoadedModel, rig_of: MakeRig, device_lane: CpuLane, undisturbed: object,
    error: Exception, num_executed: int, state: str,
) -> None:  # fmt: skip
    form = WholeForm(model, error, 99)
    costs = replace(profile(LAYERS), whole={form.name: WholeCosts(((512, 4096, 1e-9),))})
    device = Device(LAYERS)

    def open_npu(on_phase: OnPhase) -> OpenedNpu:
        return OpenedNpu(NpuForms(SimulatedLane(device_lane, device), (form,)), costs, "a test")

    rig = rig_of(device=device, open_npu=open_npu)
    rig.dispatcher.open()
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed
    assert form.num_executed == num_executed and rig.lane.state == state


def test_an_error_of_the_cpu_is_not_the_npus(rig_of: MakeRig) -> None:
    rig = rig_of(costs=profile(LAYERS, npu_s=1.0, cpu_s=1e-6))
    rig.dispatcher.open()
    batch = make_batch([Span([1, 2], [0])], 63)
    lane = rig.dispatcher._open_cpu_lane()._lane

    def broken(index: int) -> None:
        raise DeviceError("the CPU's own")

    original, lane.run = lane.run, broken  # type: ignore[method-assign]
    try:
        with pytest.raises(DeviceError, match="the CPU's own"):
            rig.dispatcher.execute(batch)
    finally:
        lane.run = original  # type: ignore[method-assign]
    assert rig.lane.state == "open"


def test_strictly_a_step_waits_until_the_npu_is_back(rig_of: MakeRig) -> None:
    rig = rig_of(
        device=faulty(Place(1), DeviceLost("SSR"), nth=1),
        policy=NpuPolicy(is_strict=True),
    )
    rig.dispatcher.open()
    batch = make_batch([Span([1, 2], [0])], 63)
    expected = rig.dispatcher.execute(batch).copy()
    rig.dispatcher._gate.retry_at_s = 0.0

    def due_at_once(seconds: float) -> None:
        rig.clock.now_s += seconds

    rig.dispatcher._sleep = due_at_once
    assert np.array_equal(rig.dispatcher.execute(batch), expected)
    assert rig.steps("cpu") == 0 and rig.opener.num_opened == 2
    assert rig.clock.now_s == 1_002.0, "after the back-off, not before"


def test_strictly_a_step_is_refused_with_the_reason_when_the_npu_stays_away(
    rig_of: MakeRig,
) -> None:
    rig = rig_of(
        device=faulty(Place(1), DeviceLost("SSR"), nth=0),
        policy=NpuPolicy(is_strict=True, max_wait_s=5.0),
    )
    rig.dispatcher.open()
    rig.opener.failures = [DeviceLost("still dead")] * 9
    waited: list[float] = []

    def advance(seconds: float) -> None:
        waited.append(seconds)
        rig.clock.now_s += seconds

    rig.dispatcher._sleep = advance
    batch = make_batch([Span([1, 2], [0])], 63)
    with pytest.raises(DeviceUnavailable, match="allows nothing else: still dead"):
        rig.dispatcher.execute(batch)
    assert sum(waited) == pytest.approx(5.0)
    with pytest.raises(DeviceUnavailable, match="still dead"):
        rig.dispatcher.execute(batch)
    assert sum(waited) == pytest.approx(5.0), "who comes then does not wait again"
    assert rig.steps("cpu") == 0


def test_strictly_what_fails_at_opening_ends_the_start(rig_of: MakeRig) -> None:
    rig = rig_of(policy=NpuPolicy(is_strict=True))
    rig.opener.failures = [DeviceFull("needs 3 GB")]
    with pytest.raises(DeviceFull, match="needs 3 GB"):
        rig.dispatcher.open()


def test_requests_refused_for_want_of_the_npu_end_with_an_error_and_later_ones_run(
    rig_of: MakeRig, undisturbed: dict[str, tuple[object, ...]]
) -> None:
    rig = rig_of(
        device=faulty(Place(1), DeviceLost("SSR"), nth=3),
        policy=NpuPolicy(is_strict=True, max_wait_s=5.0),
    )
    rig.dispatcher.open()
    rig.opener.failures = [DeviceLost("still dead")] * 2

    def advance(seconds: float) -> None:
        rig.clock.now_s += seconds

    rig.dispatcher._sleep = advance
    run = serve(rig.model, {0: REQUESTS[:1]})
    reply: Reply = run.replies["greedy"]
    assert reply.finish_reason is FinishReason.UNAVAILABLE
    assert reply.error == "the NPU is closed and --device npu allows nothing else: still dead"
    rig.clock.now_s += 60.0
    rig.opener.failures = []
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed


def test_an_engine_after_a_hang_begins_on_the_cpu(rig_of: MakeRig, tmp_path: object) -> None:
    memory = FaultMemory(tmp_path / "hang.json")  # type: ignore[operator]
    for _ in range(3):
        memory.record_hang("segment 3 on npu did not come back within 20 s")
    rig = rig_of(memory=memory)
    rig.dispatcher.open()
    batch = make_batch([Span([1, 2], [0])], 63)
    rig.dispatcher.execute(batch)
    assert rig.lane.state == "closed" and "segment 3 on npu did not come back" in rig.lane.detail
    assert rig.steps("cpu") == 1 and rig.opener.num_opened == 0
    rig.clock.now_s += 4 * FIRST_BACK_OFF_S
    rig.dispatcher.execute(batch)
    rig.dispatcher.execute(batch)
    assert rig.steps("npu") >= 1
    assert memory.last_hang() is not None, "it has not shown yet that it works"
    rig.clock.now_s += 61.0
    rig.dispatcher.execute(batch)
    assert memory.last_hang() is None


def test_the_lease_is_held_for_steps_on_the_npu_only(rig_of: MakeRig) -> None:
    held: list[str] = []

    class Lease:
        def __enter__(self) -> None:
            held.append("taken")

        def __exit__(self, *error: object) -> None:
            held.append("given back")

    rig = rig_of(lease=Lease(), device=faulty(Place(0), DeviceLost("SSR"), nth=1))
    batch = make_batch([Span([1, 2], [0])], 63)
    rig.dispatcher.execute(batch)
    assert held == [] or rig.lane.state == "open"
    rig.dispatcher.open()
    held.clear()
    rig.dispatcher.execute(batch)
    rig.dispatcher.execute(batch)
    assert held == ["taken", "given back"] * 2, "also when the step fails"
    rig.dispatcher.execute(batch)
    assert len(held) == 4


def test_the_npu_is_opened_in_the_background_while_the_cpu_answers(
    model: LoadedModel, device_lane: CpuLane, undisturbed: object
) -> None:
    import threading

    may_open = threading.Event()
    device, costs = Device(LAYERS), profile(LAYERS)

    def slowly(on_phase: Callable[[str], None]) -> OpenedNpu:
        on_phase("compiling 1 of 4")
        may_open.wait()
        return opening(device_lane, device, costs)(on_phase)

    rig = make_rig(model, device_lane, device)
    phases: list[str] = []
    rig.dispatcher._opener = opener = NpuOpener(slowly, phases.append)
    rig.dispatcher.open()
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed
    assert rig.steps("npu") == 0 and phases == ["compiling 1 of 4"]
    may_open.set()
    assert opener.wait(60)
    assert contents(serve(rig.model, ARRIVALS)) == undisturbed
    assert rig.steps("npu") > 0
    rig.close()


def test_the_account_says_what_each_device_did(rig_of: MakeRig) -> None:
    rig = rig_of(device=faulty(Place(0), DeviceLost("SSR"), nth=2))
    rig.dispatcher.open()
    batch = make_batch([Span([1, 2, 3], [0])], 63)
    for _ in range(5):
        rig.dispatcher.execute(batch)
    npu, cpu = rig.dispatcher.usage.lanes
    assert (npu.num_steps, npu.num_tokens, npu.num_faults) == (2, 6, 1)
    assert (cpu.num_steps, cpu.num_tokens) == (3, 9)
    assert npu.copied_bytes == 1_000 * (2 * (LAYERS + 2) + 1), "also of the lane that is closed"


def test_the_cpu_alone_is_one_call(model: LoadedModel) -> None:
    alone = CpuDispatcher(model.runner)
    batch = make_batch([Span([1, 2, 3], [0])], 63)
    expected = model.runner.execute(batch).copy()
    assert np.array_equal(alone.execute(batch), expected)
    assert alone.usage.devices == ("cpu",)
    assert [(u.num_steps, u.num_tokens) for u in alone.usage.lanes] == [(1, 3)]
