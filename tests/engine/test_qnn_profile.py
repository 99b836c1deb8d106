"""QNN's own measurements: what is read of the provider's file, and where it lies in a trace."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.buckets import Piece
from engine.bundle import Bundle
from engine.dispatcher import Dispatcher
from engine.loader import load_engine
from engine.npu.calls import CallAccount
from engine.npu.device_config import NpuSettings
from engine.npu.graphs import NpuGraphs
from engine.npu.qnn_profile import TRACK, QnnProfile, call_spans, open_profile, parse_rows
from engine.npu.qnn_session import open_graph, run_once
from engine.recorder import NO_RECORDER
from engine.span import Category
from engine.span_recorder import SpanRecorder
from engine.step_form import NO_PROFILE
from tests.batches import Span, make_batch
from tests.emulator import emulated_options
from tests.npu_engine_process import engine_config
from tests.tiny_graphs import FORMS, write_weights
from tests.traces import assert_nested

HEADER = (
    "Msg Timestamp,Message,Time,Unit of Measurement,Timing Source,Event Level,Event Identifier\n"
)
DETAILED = (
    "0,BACKEND,4,COUNT,BACKEND,ROOT,Number of HVX threads used\n"
    "0,BACKEND,30,US,BACKEND,ROOT,Time for initial VTCM acquire\n"
    "0,BACKEND,4000,CYCLES,BACKEND,ROOT,Accelerator (execute) time (cycles)\n"
    "0,NODE,1000,CYCLES,BACKEND,SUB-EVENT,segment/MatMulNBits_0:OpId_25 (cycles)\n"
    "0,NODE,0,CYCLES,BACKEND,SUB-EVENT,segment/Cast_1:OpId_31 (cycles)\n"
    '0,NODE,3000,CYCLES,BACKEND,SUB-EVENT,"segment/Add, fused:OpId_32 (cycles)"\n'
    "0,BACKEND,400,US,BACKEND,ROOT,Accelerator (execute) time\n"
    "0,EXECUTE,600,US,BACKEND,ROOT,QNN (execute) time\n"
)
"""As version 2.7 of the provider writes it in the emulator, with round numbers."""

OLDER = "UNKNOWN,EXECUTE,3100,US,BACKEND,ROOT,NULL\n"
WIDER = "0,EXECUTE,500,US,BACKEND,ROOT,QNN (execute) time,MatMul_0\n"


def test_a_detailed_call_becomes_nested_spans() -> None:
    spans = call_spans(parse_rows(HEADER + DETAILED), 0, 1_000_000)
    outer, inner, *nodes = spans
    assert (outer.name, outer.start_ns, outer.end_ns) == ("QNN (execute) time", 200_000, 800_000)
    assert (inner.name, inner.start_ns, inner.end_ns) == (
        "Accelerator (execute) time", 300_000, 700_000,
    )  # fmt: skip
    assert [(n.name, n.start_ns, n.end_ns) for n in nodes] == [
        ("segment/MatMulNBits_0:OpId_25", 300_000, 400_000),
        ("segment/Add, fused:OpId_32", 400_000, 700_000),
    ]
    assert nodes[0].args == {"cycles": 1000}
    assert outer.args["Number of HVX threads used"] == 4
    assert outer.args["Time for initial VTCM acquire"] == 30
    assert {span.track for span in spans} == {TRACK}
    assert_nested(spans)


@pytest.mark.parametrize("text", [OLDER, WIDER, HEADER + OLDER])
def test_other_versions_of_the_provider_are_read(text: str) -> None:
    (span,) = call_spans(parse_rows(text), 0, 10_000_000)
    assert span.name == "QNN (execute) time"
    assert span.end_ns - span.start_ns in (3_100_000, 500_000)


@pytest.mark.parametrize("text", ["", HEADER, "0,EXECUTE,x,US,BACKEND,ROOT,NULL\n", "0,EXEC", "\n"])
def test_what_is_no_call_gives_no_spans(text: str) -> None:
    assert call_spans(parse_rows(text), 0, 100) == []


def test_loading_is_no_call() -> None:
    rows = parse_rows("0,INIT,3807,US,BACKEND,ROOT,QNN (load binary) time\n")
    assert call_spans(rows, 0, 100) == []


def test_a_clock_that_runs_ahead_never_leaves_the_call() -> None:
    spans = call_spans(parse_rows(DETAILED), 1_000, 101_000)
    assert all(1_000 <= span.start_ns <= span.end_ns <= 101_000 for span in spans)
    assert_nested(spans)


def test_only_what_is_new_in_the_file_is_taken() -> None:
    profile = QnnProfile("basic")
    path = Path(profile.provider_options["profiling_file_path"])
    assert profile.take() == []
    path.write_text(HEADER + OLDER)
    assert [row.value for row in profile.take()] == [3100]
    with path.open("a") as file:
        file.write(WIDER)
    assert [row.value for row in profile.take()] == [500]
    assert profile.take() == []
    profile.close()
    assert not path.parent.exists()


def test_off_there_is_no_file_and_no_option_and_nobody_to_ask() -> None:
    assert open_profile("") == (NO_PROFILE, {})
    assert NO_PROFILE.beside(NO_RECORDER) is NO_RECORDER
    profile = QnnProfile("basic")
    assert profile.beside(NO_RECORDER) is NO_RECORDER
    profile.close()


@pytest.mark.npu
@pytest.mark.parametrize("level", ["basic", "detailed"])
def test_the_emulator_tells_of_every_call(level: str, tmp_path: Path) -> None:
    profile = QnnProfile(level)
    options = emulated_options(88)
    options = replace(
        options, provider_options={**options.provider_options, **profile.provider_options}
    )
    graphs = NpuGraphs(*write_weights(tmp_path, FORMS["plain"]))
    name = graphs.names[1]
    session = open_graph(graphs.model(name, 8), name, options, tmp_path)
    inputs = {each.name: np.ones(each.shape, np.float32) for each in session._owner.get_inputs()}
    run_once(session, inputs)  # before the trace: not a part of it
    bound = session.binding()
    arrays = [*inputs.items()]
    for input_name, array in arrays:
        bound.bind_input(input_name, array)
    outputs = {o.name: np.empty(o.shape, np.float32) for o in session._owner.get_outputs()}
    for output_name, array in outputs.items():
        bound.bind_output(output_name, array)
    recorder, account = SpanRecorder(), CallAccount(False, "lane npu")
    account.recorder = profile.beside(recorder)
    for _ in range(2):
        account.call(bound, Piece(0, 3, 8), 1)
    spans = recorder.take().spans
    calls = [span for span in spans if span.category is Category.NPU_CALL]
    outer = [span for span in spans if span.name == "QNN (execute) time"]
    assert len(calls) == len(outer) == 2
    for call, own in zip(calls, outer, strict=True):
        assert call.start_ns <= own.start_ns <= own.end_ns <= call.end_ns
        assert own.end_ns - own.start_ns > 0.2 * (call.end_ns - call.start_ns)
    has_nodes = any("MatMulNBits" in span.name for span in spans)
    assert has_nodes == (level == "detailed")
    assert_nested(spans)
    profile.close()


@pytest.mark.npu
def test_a_step_on_the_emulated_npu_shows_every_segment_with_what_the_npu_measured(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle.path, tmp_path / "tiny"))
    settings = NpuSettings(profiling="basic")
    config = engine_config(bundle, tmp_path / "state", device="npu-emulated", npu=settings)
    runner = load_engine(config, lambda phase: None).runner
    assert isinstance(runner, Dispatcher)
    batch = make_batch([Span([1, 2, 3], [0])], 9, "last")
    plain = runner.execute(batch).copy()
    recorder = SpanRecorder()
    runner.record(recorder)
    assert np.array_equal(runner.execute(batch), plain)
    runner.record(NO_RECORDER)
    spans = recorder.take().spans
    kinds = Counter(span.category for span in spans)
    assert kinds[Category.SEGMENT] == kinds[Category.NPU_CALL] == 4, "three segments and the head"
    assert kinds[Category.ATTENTION] == 2
    outer = [span for span in spans if span.name == "QNN (execute) time"]
    calls = [span for span in spans if span.category is Category.NPU_CALL]
    assert len(outer) == len(calls)
    for call, measured in zip(calls, outer, strict=True):
        assert call.start_ns <= measured.start_ns <= measured.end_ns <= call.end_ns
    assert_nested(spans)
    runner.close()
