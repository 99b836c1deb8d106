"""What runners tell of their steps, and that telling it changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.errors import DeviceLost
from engine.halves import cut_batch
from engine.lane import head
from engine.model_runner import LaneSteps, StepLanes
from engine.npu.lane import LaneGraphs, NpuLane
from engine.overlapped_step import OverlappedStep
from engine.recorder import NO_RECORDER
from engine.session import CpuSessions
from engine.span import Category, Span, TracedStep, ns_per_tick
from engine.span_recorder import SpanRecorder
from tests import batches
from tests.batches import int32, make_batch
from tests.loaded_model import LoadedModel, load_model, spoil
from tests.simulated_lane import Device, Faults, Place, SimulatedLane, raising
from tests.traces import assert_nested

LAYERS = 2
BATCH = [batches.Span([7] * 40, [3, 1, 2]), batches.Span([5], [4], 0)]


@pytest.fixture(scope="module", params=["auto", "onnxruntime"])
def model(request: pytest.FixtureRequest, tiny_bundle: Bundle) -> LoadedModel:
    return load_model(tiny_bundle, num_threads=2, kernels=request.param)


@pytest.fixture(scope="module")
def sessions_model(tiny_bundle: Bundle) -> LoadedModel:
    return load_model(tiny_bundle)


@dataclass
class Recorded:
    start_ns: int
    end_ns: int
    step: TracedStep

    @property
    def spans(self) -> list[Span]:
        return self.step.all_spans(ns_per_tick(self.step.teams))

    def of(self, category: Category) -> list[Span]:
        return [span for span in self.spans if span.category is category]


def record(model: LoadedModel, rows: str = "last") -> Recorded:
    recorder = SpanRecorder()
    model.runner.record(recorder)
    start_ns = recorder.now_ns()
    try:
        model.runner.execute(make_batch(BATCH, 63, rows))
    finally:
        model.runner.record(NO_RECORDER)
    return Recorded(start_ns, recorder.now_ns(), recorder.take())


def test_logits_have_the_same_bits_with_and_without_a_recorder(model: LoadedModel) -> None:
    plain = model.runner.execute(make_batch(BATCH, 63)).copy()
    recorder = SpanRecorder()
    model.runner.record(recorder)
    traced = model.runner.execute(make_batch(BATCH, 63)).copy()
    model.runner.record(NO_RECORDER)
    assert np.array_equal(plain, traced)
    recorder.take()
    model.runner.execute(make_batch(BATCH, 63))
    assert recorder.take() == TracedStep(()), "it is told nothing more"


@pytest.mark.parametrize("rows", ["all", "last", "none"])
def test_spans_nest_and_lie_within_the_step(model: LoadedModel, rows: str) -> None:
    recorded = record(model, rows)
    assert_nested(recorded.spans)
    assert min(span.start_ns for span in recorded.spans) >= recorded.start_ns
    assert max(span.end_ns for span in recorded.spans) <= recorded.end_ns


def test_every_layer_has_its_attention(model: LoadedModel) -> None:
    layers = {span.args["layer"] for span in record(model).of(Category.ATTENTION)}
    assert layers == set(range(LAYERS))


def test_threads_are_busy_or_wait_all_the_time(tiny_bundle: Bundle) -> None:
    """A team of two: nothing between the first phase and the last is left unaccounted for."""
    recorded = record(load_model(tiny_bundle, num_threads=2, kernels="auto"))
    (team,) = recorded.step.teams
    for number in range(len(team.ticks)):
        own = [s for s in recorded.spans if s.track == f"cpu thread {number}"]
        covered = sum(span.end_ns - span.start_ns for span in own)
        assert covered == own[-1].end_ns - own[0].start_ns
        assert [s.args.get("layer") for s in own if s.name == "qkv"] == list(range(LAYERS))
        assert [s.name for s in own if not s.args and s.name != "wait"] == [
            "norm",
            "head",
            "logits",
        ]


def test_a_step_without_logits_has_no_head(tiny_bundle: Bundle) -> None:
    model = load_model(tiny_bundle, num_threads=2, kernels="auto")
    record(model, "last")
    names = {span.name for span in record(model, "none").spans}
    assert "attention" in names and "head" not in names


def test_segments_tell_their_lane_layer_and_tokens(sessions_model: LoadedModel) -> None:
    segments = record(sessions_model).of(Category.SEGMENT)
    assert [span.name for span in segments] == ["segment 0", "segment 1", "last segment", "head"]
    assert [span.args["tokens"] for span in segments] == [41, 41, 2, 2]
    assert {span.args["lane"] for span in segments} == {"cpu"}
    (first, _) = record(sessions_model).of(Category.ATTENTION)
    assert (first.args["tokens"], first.args["keys"]) == (41, 41)


def test_halves_show_which_of_them_runs_beside_the_other(sessions_model: LoadedModel) -> None:
    steps = sessions_model.runner
    assert isinstance(steps, LaneSteps)
    lanes = StepLanes.all_on(SimulatedLane(sessions_model.lane, Device(LAYERS)), LAYERS)
    batch = make_batch(BATCH, 63)
    spoil(sessions_model.cache)
    whole = steps.execute_on(lanes, batch).copy()
    recorder, step = SpanRecorder(), OverlappedStep(steps)
    steps.record(recorder)
    halves = step.execute(lanes, *cut_batch(batch, 20)).copy()
    steps.record(NO_RECORDER)
    step.close()
    assert np.array_equal(halves, whole)
    spans = recorder.take().spans
    assert_nested(spans)
    assert sum(span.category is Category.SEGMENT for span in spans) == 2 * LAYERS + 2
    assert [s.args["tokens"] for s in spans if s.name == "attention"] == [20, 21] * LAYERS


def test_a_lane_is_itself_wherever_a_step_uses_it(sessions_model: LoadedModel) -> None:
    """Steps copy the residual where the lane changes: that must not happen for being watched."""
    other = SimulatedLane(sessions_model.lane, Device(LAYERS))
    lanes = StepLanes((sessions_model.lane, other), sessions_model.lane, other)
    recorder = SpanRecorder()
    watched = recorder.lanes(lanes)
    assert watched.segments[0] is watched.last is not watched.segments[1]
    assert watched.segments[1] is watched.head
    assert recorder.lanes(lanes).last is watched.last


def test_a_segment_that_fails_is_told_too(sessions_model: LoadedModel) -> None:
    steps = sessions_model.runner
    assert isinstance(steps, LaneSteps)
    device = Device(LAYERS, faults=Faults(Place(1), raising(DeviceLost("gone"))))
    lanes = StepLanes.all_on(SimulatedLane(sessions_model.lane, device), LAYERS)
    recorder = SpanRecorder()
    steps.record(recorder)
    with pytest.raises(DeviceLost):
        steps.execute_on(lanes, make_batch(BATCH, 63))
    steps.record(NO_RECORDER)
    names = [s.name for s in recorder.take().spans if s.category is Category.SEGMENT]
    assert names == ["segment 0", "segment 1"]


def test_calls_into_a_device_tell_their_buckets(tiny_bundle: Bundle) -> None:
    sessions = CpuSessions(1)
    files = [f"cpu_segment_{i:03}.onnx" for i in range(LAYERS + 1)]
    segments = [sessions.open(tiny_bundle.path / name) for name in files]
    heads = {1: sessions.open(tiny_bundle.path / "cpu_head.onnx")}
    lane = NpuLane(tiny_bundle.config, LaneGraphs({1: segments, 8: segments}, heads), "npu", 40, 4)
    recorder = SpanRecorder()
    lane.record(recorder)
    lane.begin(9)
    lane.run(0)
    lane.run(1)
    head(lane, int32([8]))
    calls = recorder.take().spans
    assert {span.track for span in calls} == {"lane npu"}
    first = [(s.args["rows"], s.args["bucket"]) for s in calls if s.name == files[0]]
    assert sum(rows for rows, _ in first) == 9  # type: ignore[misc]
    assert sorted(bucket for _, bucket in first) in ([1, 8], [8, 8])
    assert lane.counters.num_calls == len(calls)
    assert_nested(calls)


def test_nobody_who_listens_costs_no_objects() -> None:
    """Lanes and attention are handed back as they are."""
    lanes, attend = object(), object()
    assert NO_RECORDER.lanes(lanes) is lanes  # type: ignore[arg-type]
    assert NO_RECORDER.attend(attend, object()) is attend  # type: ignore[arg-type]
    assert NO_RECORDER.now_ns() == 0
