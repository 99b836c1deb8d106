"""The QNN provider: what it finds, how its errors read, and that nothing falls back to the CPU."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from engine.errors import (
    ContextRejected,
    DeviceError,
    DeviceFull,
    DeviceLost,
    DeviceUnavailable,
    GraphRefused,
)
from engine.npu.graphs import NpuGraphs
from engine.npu.qnn_errors import open_error, run_error
from engine.npu.qnn_session import (
    QnnOptions,
    driver_problem,
    find_emulator,
    find_npu,
    open_context,
    open_graph,
)
from tests.tiny_graphs import FORMS, HIDDEN, write_weights

EMULATED = QnnOptions(88, emulated=True)


def test_the_search_for_an_npu_says_what_it_found() -> None:
    found, finding = find_npu()
    assert isinstance(found, bool) and len(finding) > 20
    assert find_npu() == (found, finding)


def test_the_search_for_the_emulator_says_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, finding = find_emulator()
    assert len(finding) > 20
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert find_emulator() == (False, "the emulator of the HTP exists for x86-64 Linux only")


def test_without_the_package_there_is_no_npu_and_it_says_so() -> None:
    script = (
        "import sys; sys.modules['onnxruntime_qnn'] = None\n"
        "from engine.npu.qnn_session import find_npu; print(find_npu())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "(False, 'the package onnxruntime-qnn is not installed')"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("NPU crashed. SSR detected during QNN graph execute.", DeviceLost),
        ("QNN_COMMON_ERROR_SYSTEM_COMMUNICATION: fatal", DeviceLost),
        ("[ONNXRuntimeError] : 1 : FAIL : QNN graph execute error. Error code: 6031", DeviceError),
    ],
)
def test_what_a_failed_run_stands_for(message: str, kind: type[DeviceError]) -> None:
    assert run_error(message) is kind


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("contextCreateFromBinary failed. Error: QNN_COMMON_ERROR_MEM_ALLOC", DeviceFull),
        ("rpcmem_alloc() failed to allocate and returned nullptr.", DeviceFull),
        (
            "contextCreateFromBinary failed. Error: QNN_CONTEXT_ERROR_CREATE_FROM_BINARY",
            ContextRejected,
        ),
        ("The file path in ep_cache_context does not exist", ContextRejected),
        ("SSR occurrence (unsuccessful recovery).", DeviceLost),
        ("Failed to compose Qnn graph.", DeviceError),
    ],
)
def test_what_a_failed_opening_stands_for(message: str, kind: type[DeviceError]) -> None:
    assert open_error(message) is kind


def test_a_context_that_is_not_there_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ContextRejected, match="is missing"):
        open_context(tmp_path / "head_t1_ctx.onnx", EMULATED, shared=False)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> tuple[NpuGraphs, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return NpuGraphs(*write_weights(folder, FORMS["plain"])), folder


@pytest.mark.npu
def test_several_bindings_of_one_session_keep_apart(graphs: tuple[NpuGraphs, Path]) -> None:
    made, folder = graphs
    session = open_graph(made.head(4), "head", EMULATED, folder)
    inputs = np.random.default_rng(0).standard_normal((3, 1, 4, HIDDEN)).astype(np.float32)
    outputs = np.zeros((3, 1, 4, made.config.vocab_size), np.float32)
    bindings = [session.binding() for _ in range(3)]
    for binding, x, y in zip(bindings, inputs, outputs, strict=True):
        binding.bind_input("hidden", x)
        binding.bind_output("logits", y)
    for binding in reversed(bindings):
        binding.run()
    assert len({row.tobytes() for row in outputs}) == 3
    first = outputs[0].copy()
    inputs[0] = inputs[1]
    bindings[0].run()
    assert (outputs[0] == outputs[1]).all() and (outputs[0] != first).any()


@pytest.mark.npu
def test_a_run_that_fails_is_a_device_error_of_one_line(graphs: tuple[NpuGraphs, Path]) -> None:
    made, folder = graphs
    session = open_graph(made.head(4), "the head", EMULATED, folder)
    session.bind_input("hidden", np.zeros((1, 5, HIDDEN), np.float32))
    session.bind_output("logits", np.zeros((1, 4, made.config.vocab_size), np.float32))
    with pytest.raises(DeviceError, match=r"^the head failed: ") as caught:
        session.run()
    assert "\n" not in str(caught.value) and caught.value.__cause__ is not None


@pytest.mark.npu
def test_run_options_can_be_changed_while_a_session_is_open(graphs: tuple[NpuGraphs, Path]) -> None:
    made, folder = graphs
    options = QnnOptions(88, True, {}, {"qnn.htp_perf_mode": "burst"})
    session = open_graph(made.head(1), "head", options, folder)
    binding = session.binding()
    session.set_run_options({"qnn.htp_perf_mode": "balanced", "qnn.rpc_control_latency": "100"})
    binding.bind_input("hidden", np.ones((1, 1, HIDDEN), np.float32))
    logits = np.zeros((1, 1, made.config.vocab_size), np.float32)
    binding.bind_output("logits", logits)
    binding.run()
    assert logits.any()


@pytest.mark.npu
def test_a_chip_that_qnn_does_not_know_is_unavailable(graphs: tuple[NpuGraphs, Path]) -> None:
    made, folder = graphs
    with pytest.raises(DeviceUnavailable, match="head: .* does not take the chip 9999"):
        open_graph(made.head(1), "head", QnnOptions(9999, emulated=True), folder)


@pytest.mark.npu
def test_a_machine_without_an_npu_needs_the_number_of_a_chip(
    graphs: tuple[NpuGraphs, Path],
) -> None:
    made, folder = graphs
    with pytest.raises(DeviceUnavailable, match="no Hexagon NPU"):
        open_graph(made.head(1), "head", QnnOptions(emulated=True), folder)


@pytest.mark.npu
def test_a_graph_with_free_dimensions_is_refused_and_nothing_is_printed(
    graphs: tuple[NpuGraphs, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    made, folder = graphs
    model = onnx.load_from_string(made.head(4))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "T"
    with pytest.raises(GraphRefused, match="refuses RMSNormalization head_t4/RMSNormalization_0: "):
        open_graph(model.SerializeToString(), "head", EMULATED, folder)
    printed = capfd.readouterr()
    assert "QNN" not in printed.out + printed.err


@pytest.mark.npu
def test_the_provider_has_nothing_to_say_of_a_driver_where_there_is_no_npu() -> None:
    assert driver_problem() is None
