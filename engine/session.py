"""ONNX Runtime, and the only module that imports it: sessions, bindings, devices, its errors.

A session never falls back to another provider behind our back. Thread pools: every segment's
session has one of its own, whose threads spin for 20 microseconds only; measured against one
global pool in docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from engine.errors import BundleError, DeviceError

_SPIN_US = "20"
_GROW_AS_ASKED = 1
_CPU = "CPUExecutionProvider"
_QNN = "QNNExecutionProvider"
_ERRORS = (
    ort_state.EPFail, ort_state.EngineError, ort_state.Fail, ort_state.InvalidArgument,
    ort_state.InvalidGraph, ort_state.InvalidProtobuf, ort_state.ModelLoaded, ort_state.NoModel,
    ort_state.NoSuchFile, ort_state.NotImplemented, ort_state.RuntimeException, RuntimeError,
)  # fmt: skip


@contextmanager
def _translated(kind: type[BundleError] | type[DeviceError], what: str) -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise kind(f"{what}: {first_line}") from error


class CpuSessions:
    """Opens graphs on the CPU provider that share one memory arena for what they compute with.

    They run one after another, so one arena of a segment's size serves them all; an arena of its
    own for each would hold 20 MB per segment after one large prefill.
    """

    def __init__(self, num_threads: int) -> None:
        arena = ort.OrtMemoryInfo(
            "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
        )
        ort.create_and_register_allocator(arena, ort.OrtArenaCfg(0, _GROW_AS_ASKED, -1, -1))
        self._options = ort.SessionOptions()
        self._options.intra_op_num_threads = num_threads
        self._options.inter_op_num_threads = 1
        self._options.enable_mem_pattern = False  # T varies from step to step
        self._options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
        self._options.add_session_config_entry("session.use_env_allocators", "1")

    def open(self, path: Path) -> Session:
        """Raises BundleError when the graph or its weights cannot be loaded."""
        with _translated(BundleError, f"{path} cannot be loaded"):
            session = ort.InferenceSession(path, self._options, providers=[_CPU])
        return Session(path.name, session)


class Session:
    """One graph with its inputs and outputs bound to arrays of ours."""

    def __init__(self, name: str, session: ort.InferenceSession) -> None:
        self._name = name
        session.disable_fallback()
        self._session = session._sess  # the wrapper's own checks cost as much as a small graph
        self._binding = session.io_binding()
        self._raw_binding = self._binding._iobinding

    def bind_input(self, name: str, array: NDArray[np.float32]) -> None:
        """`array` must be C-contiguous and outlive the binding; it is read at every run."""
        self._binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)

    def bind_output(self, name: str, array: NDArray[np.float32]) -> None:
        """`array` must be C-contiguous, of the output's exact shape, and outlive the binding."""
        self._binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)

    def run(self) -> None:
        """Raises DeviceError."""
        try:
            self._session.run_with_iobinding(self._raw_binding, None)
        except _ERRORS as error:
            with _translated(DeviceError, f"{self._name} failed"):
                raise error


class CallableSession:
    """One graph that is called with arrays of whatever shapes this call has."""

    def __init__(self, name: str, session: ort.InferenceSession) -> None:
        self._name = name
        session.disable_fallback()
        self._session = session
        self._outputs = [output.name for output in session.get_outputs()]

    def run(self, **inputs: NDArray[np.float32] | NDArray[np.int32]) -> NDArray[np.float32]:
        """The graph's only output, in memory of its own. Raises DeviceError."""
        with _translated(DeviceError, f"{self._name} failed"):
            (output,) = self._session.run(self._outputs, inputs)
        result: NDArray[np.float32] = output
        return result


def open_callable(path: Path, num_threads: int) -> CallableSession:
    """On the CPU provider. Raises BundleError when the graph or its weights cannot be loaded."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # shapes vary from call to call
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    with _translated(BundleError, f"{path} cannot be loaded"):
        session = ort.InferenceSession(path, options, providers=[_CPU])
    return CallableSession(path.name, session)


def find_npu() -> tuple[bool, str]:
    """Whether a Hexagon NPU can be used, and a sentence that says why or why not."""
    try:
        import onnxruntime_qnn
    except ImportError:
        return False, "the package onnxruntime-qnn is not installed"
    try:
        ort.register_execution_provider_library(_QNN, onnxruntime_qnn.get_library_path())
    except _ERRORS as error:
        return False, f"the QNN provider cannot be loaded: {str(error).splitlines()[0]}"
    devices = [device for device in ort.get_ep_devices() if device.ep_name == _QNN]
    found = any(device.device.type == ort.OrtHardwareDeviceType.NPU for device in devices)
    del devices
    ort.unregister_execution_provider_library(_QNN)  # nothing uses it yet
    if found:
        return True, "the QNN provider lists a Hexagon NPU"
    return False, "the QNN provider lists no Hexagon NPU on this machine"
