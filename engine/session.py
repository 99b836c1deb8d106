"""ONNX Runtime on the CPU: sessions, bindings, its errors. The NPU's are in `qnn_session.py`.

A session never falls back to another provider behind our back. Thread pools: every segment's
session has one of its own, whose threads spin for 20 microseconds only; measured against one
global pool in docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from engine.errors import BundleError, DeviceError, EngineError

_SPIN_US = "20"
_GROW_AS_ASKED = 1
_CPU = "CPUExecutionProvider"
ORT_ERRORS = (
    ort_state.EPFail, ort_state.EngineError, ort_state.Fail, ort_state.InvalidArgument,
    ort_state.InvalidGraph, ort_state.InvalidProtobuf, ort_state.ModelLoaded, ort_state.NoModel,
    ort_state.NoSuchFile, ort_state.NotImplemented, ort_state.RuntimeException, RuntimeError,
)  # fmt: skip


@contextmanager
def translated(kind: type[EngineError], what: str) -> Iterator[None]:
    """ONNX Runtime's errors inside the block become one line of `kind`."""
    try:
        yield
    except ORT_ERRORS as error:
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
        with translated(BundleError, f"{path} cannot be loaded"):
            session = ort.InferenceSession(path, self._options, providers=[_CPU])
        return Session(path.name, session)


class Session:
    """One graph with its inputs and outputs bound to arrays of ours."""

    def __init__(
        self,
        name: str,
        session: ort.InferenceSession,
        run_options: ort.RunOptions | None = None,
        device_error: Callable[[str], type[DeviceError]] = lambda message: DeviceError,
    ) -> None:
        """`device_error` picks the kind of error that the message of a failed run stands for."""
        self._name = name
        session.disable_fallback()
        self._owner = session
        self._session = session._sess  # the wrapper's own checks cost as much as a small graph
        self._binding = session.io_binding()
        self._raw_binding = self._binding._iobinding
        self._run_options = run_options
        self._device_error = device_error

    @property
    def name(self) -> str:
        return self._name

    def binding(self) -> Session:
        """The same loaded graph with bindings of its own."""
        return Session(self._name, self._owner, self._run_options, self._device_error)

    def bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        """`array` must be C-contiguous and outlive the binding; it is read at every run."""
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def bind_output(self, name: str, array: NDArray[np.generic]) -> None:
        """`array` must be C-contiguous, of the output's exact shape, and outlive the binding."""
        self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(self) -> None:
        """Raises DeviceError."""
        try:
            self._session.run_with_iobinding(self._raw_binding, self._run_options)
        except ORT_ERRORS as error:
            with translated(self._device_error(str(error)), f"{self._name} failed"):
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
        with translated(DeviceError, f"{self._name} failed"):
            (output,) = self._session.run(self._outputs, inputs)
        result: NDArray[np.float32] = output
        return result

    def run_all(self, inputs: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """All outputs by name, in memory of their own. Raises DeviceError."""
        with translated(DeviceError, f"{self._name} failed"):
            outputs = self._session.run(self._outputs, dict(inputs))
        return dict(zip(self._outputs, outputs, strict=True))


def open_callable(graph: Path | bytes, num_threads: int) -> CallableSession:
    """A file, or a serialized graph without external data, on the CPU provider.

    Raises BundleError when the graph or its weights cannot be loaded.
    """
    name, where = (graph.name, graph) if isinstance(graph, Path) else ("graph", "the graph")
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # shapes vary from call to call
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    with translated(BundleError, f"{where} cannot be loaded"):
        session = ort.InferenceSession(graph, options, providers=[_CPU])
    return CallableSession(name, session)
