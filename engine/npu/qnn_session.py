"""ONNX Runtime's QNN provider: its devices, sessions on the HTP, contexts, and its errors.

The provider's library is registered once per process and stays. Nothing ever falls back to the
CPU provider: a graph of which one node is not taken is refused with the provider's reason. The
emulator of the x86-64 Linux wheel opens graphs and contexts like a device, with one exception: it
dies of a context that shares its weights with others. Knows no models and no bundles.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from engine.errors import (
    ContextRejected,
    DeviceError,
    DeviceFull,
    DeviceUnavailable,
    GraphRefused,
)
from engine.npu.qnn_errors import (
    first_line,
    has_no_device,
    is_refusal,
    open_error,
    refusals,
    run_error,
)
from engine.session import ORT_ERRORS, Session, translated

SHARED_MEMORY_OPTION = "enable_htp_shared_memory_allocator"

_QNN = "QNNExecutionProvider"
_VERBOSE, _WARNING, _ERROR = 0, 2, 3

_logging = threading.Lock()


@dataclass(frozen=True, slots=True)
class QnnOptions:
    """`soc_model` is Qualcomm's number of the chip to compile for; None: the one in this machine.

    `provider_options` and `run_options` are handed on as they are; their sources are told in
    `configs/devices`.
    """

    soc_model: int | None = None
    emulated: bool = False
    provider_options: Mapping[str, str] = field(default_factory=dict)
    run_options: Mapping[str, str] = field(default_factory=dict)


class QnnSession(Session):
    """A graph on the HTP. One call at a time into a device, whatever session it goes to."""

    def binding(self) -> QnnSession:
        return QnnSession(self._name, self._owner, self._run_options, self._device_error)

    def set_run_options(self, options: Mapping[str, str]) -> None:
        """For all later runs, of all bindings; keys that are not named stay as they were."""
        assert self._run_options is not None, "every session on the HTP has its own"
        for key, value in options.items():
            self._run_options.add_run_config_entry(key, value)

    def set_perf_mode(self, perf_mode: str) -> None:
        """The clocks that this session asks for from now on. Raises DeviceError.

        The emulator has no clocks and ends the process when it is asked.
        """
        with translated(DeviceError, f"{self._name} cannot change the NPU's clocks"):
            self._owner.set_ep_dynamic_options({"ep.dynamic.qnn_htp_performance_mode": perf_mode})


class SharedBinding(QnnSession):
    """A binding for arrays in `SharedMemory`."""

    def __init__(self, session: Session, place: ort_state.OrtDevice) -> None:
        super().__init__(session._name, session._owner, session._run_options, session._device_error)
        self._place = place

    def bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        self._raw_binding.bind_input(
            name, self._place, array.dtype.type, array.shape, array.ctypes.data
        )

    def bind_output(self, name: str, array: NDArray[np.generic]) -> None:
        self._raw_binding.bind_output(
            name, self._place, array.dtype.type, array.shape, array.ctypes.data
        )


class SharedMemory:
    """Buffers that the CPU and the NPU both see (a `HostMemory` of `npu_lane.py`).

    The provider takes a tensor for shared by the kind of device that it is bound with, and finds
    its allocation by its address, so windows of an allocation are shared as well.
    """

    is_shared = True

    def __init__(self, info: ort.OrtMemoryInfo) -> None:
        self._info = info
        self._values: list[ort.OrtValue] = []
        self._place = ort_state.OrtDevice(
            int(ort.OrtMemoryInfoDeviceType.CPU),
            int(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE),
            info.device_vendor_id,
            info.device_id,
        )

    def allocate(self, num_rows: int, size: int) -> NDArray[np.float32]:
        """[1, num_rows, size] zeros that live as long as this memory. Raises DeviceFull."""
        with translated(DeviceFull, f"no shared memory for {num_rows * size * 4:,} bytes"):
            value = ort.OrtValue.ortvalue_from_shape_and_type(
                [1, num_rows, size], np.float32, memory_info=self._info
            )
        array: NDArray[np.float32] = value.numpy()
        if array.ctypes.data != value.data_ptr():
            raise DeviceError("the provider's shared memory cannot be seen by this process")
        array[:] = 0
        self._values.append(value)
        return array

    def binding(self, session: Session) -> SharedBinding:
        return SharedBinding(session, self._place)


def find_shared_memory(options: QnnOptions) -> SharedMemory | None:
    """Memory without copies, if it is asked for and the provider offers it for this device.

    Version 2.7 of the provider does not: it has the allocator but does not list it with the
    device (onnxruntime-qnn pull request 656 does). The emulator has none either.
    """
    if options.provider_options.get(SHARED_MEMORY_OPTION) != "1":
        return None
    info = _pick(options).memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)
    return None if info is None else SharedMemory(info)


def find_npu() -> tuple[bool, str]:
    """Whether a Hexagon NPU can be used, and a sentence that says why or why not."""
    try:
        devices = _devices()
    except DeviceUnavailable as error:
        return False, str(error)
    if any(_is_npu(device) for device in devices):
        return True, "the QNN provider lists a Hexagon NPU"
    return False, "the QNN provider lists no Hexagon NPU on this machine"


def find_emulator() -> tuple[bool, str]:
    """Whether the emulator of the HTP can be used here, and a sentence that says why or why not."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return False, "the emulator of the HTP exists for x86-64 Linux only"
    try:
        _devices()
    except DeviceUnavailable as error:
        return False, str(error)
    if not backend_library().is_file():
        return False, f"onnxruntime-qnn brings no HTP library ({backend_library()} is missing)"
    return True, "onnxruntime-qnn brings the emulator of the HTP"


def backend_library() -> Path:
    """The HTP library of the installed provider. Raises DeviceUnavailable without a provider."""
    try:
        import onnxruntime_qnn
    except ImportError as error:
        raise DeviceUnavailable("the package onnxruntime-qnn is not installed") from error
    return Path(onnxruntime_qnn.get_qnn_htp_path())


def driver_problem() -> str | None:
    """What the provider itself says is wrong with this machine's NPU or its driver, if anything.

    Raises DeviceUnavailable when there is no provider to ask.
    """
    _devices()
    for device in ort_state.get_hardware_devices():
        if device.type == ort.OrtHardwareDeviceType.NPU:
            details = ort_state.get_hardware_device_ep_incompatibility_details(_QNN, device)
            if details["reasons_bitmask"]:
                return f"{details['notes']} (error {details['error_code']})"
    return None


def open_graph(
    model: bytes | Path, name: str, options: QnnOptions, weights_folder: Path | None = None
) -> QnnSession:
    """Compiles a graph in this process and opens it; `name` is for messages.

    `weights_folder` is where the external data of a graph given as bytes lies. Raises
    DeviceUnavailable, GraphRefused with the node and the provider's reason, DeviceFull,
    DeviceLost or another DeviceError.
    """
    return _open(model, name, options, _weights_entries(weights_folder))


def open_context(path: Path, options: QnnOptions, shared: bool) -> QnnSession:
    """Opens what `compile_graph` wrote. `shared`: as it was compiled.

    Raises ContextRejected for one of another chip or version or a damaged one, DeviceFull,
    DeviceLost or another DeviceError. Opening a shared context in the emulator ends the process.
    """
    if not path.is_file():
        raise ContextRejected(f"{path} is missing")
    if shared and options.emulated:
        raise ContextRejected(f"{path} shares its weights, which the emulator cannot open")
    return _open(path, path.name, options, {"ep.share_ep_contexts": "1"} if shared else {})


def compile_graph(
    model: bytes,
    name: str,
    path: Path,
    options: QnnOptions,
    weights_folder: Path,
    shared: bool = False,
    ends_sharing: bool = False,
) -> None:
    """Writes a compiled context: the model at `path`, and a binary beside it.

    With `shared` the binary holds all graphs compiled until one `ends_sharing`; it has the name of
    the first of them and is written with the last. Raises like `open_graph`.
    """
    entries = _weights_entries(weights_folder) | {
        "ep.context_enable": "1",
        "ep.context_file_path": str(path),
        "ep.context_embed_mode": "0",
    }
    if shared:
        entries["ep.share_ep_contexts"] = "1"
    if ends_sharing:
        entries["ep.stop_share_ep_contexts"] = "1"
    _open(model, name, options, entries)


@dataclass(frozen=True, slots=True)
class Assignment:
    """How many nodes of a graph the provider took. `refusals` are (node, reason)."""

    num_on_htp: int
    num_nodes: int
    refusals: tuple[tuple[str, str], ...]


def assign(
    model: bytes | Path, name: str, options: QnnOptions, weights_folder: Path | None = None
) -> Assignment:
    """Which nodes the provider takes when the rest may fall to the CPU. Raises DeviceError."""
    entries = _weights_entries(weights_folder) | {
        "session.disable_cpu_ep_fallback": "0",
        "session.record_ep_graph_assignment_info": "1",
    }
    with _provider_messages(_VERBOSE) as messages:
        counts = _count_nodes(_create(model, options, entries, _VERBOSE, name))
    return Assignment(counts[True], sum(counts.values()), refusals(messages))


def _count_nodes(session: ort.InferenceSession) -> dict[bool, int]:
    """On the HTP or not → number of nodes. The session ends here: it logs to its last breath."""
    counts = {True: 0, False: 0}
    for subgraph in session.get_provider_graph_assignment_info():
        counts[subgraph.ep_name == _QNN] += len(subgraph.get_nodes())
    return counts


def run_once(
    session: QnnSession, inputs: Mapping[str, NDArray[np.generic]]
) -> dict[str, NDArray[np.generic]]:
    """All outputs by name, in memory of their own. For tests and measurements."""
    names = [output.name for output in session._owner.get_outputs()]
    return dict(zip(names, session._owner.run(names, dict(inputs)), strict=True))


def _open(
    model: bytes | Path, name: str, options: QnnOptions, entries: Mapping[str, str]
) -> QnnSession:
    with _provider_messages(_ERROR) as messages:
        try:
            session = _create(model, options, entries, _ERROR, name)
        except ORT_ERRORS as error:
            failure = error
        else:
            run_options = ort.RunOptions()
            opened = QnnSession(name, session, run_options, run_error)
            opened.set_run_options(options.run_options)
            return opened
    text = " ".join([*messages, str(failure)])
    if is_refusal(text):
        raise GraphRefused(f"{name}: {_why_refused(model, name, options, entries)}") from failure
    if has_no_device(text):
        chip = options.soc_model or "of this machine"
        raise DeviceUnavailable(
            f"{name}: QNN or the driver does not take the chip {chip}: "
            f"{first_line(messages, failure)}"
        ) from failure
    raise open_error(text)(f"{name} cannot be opened: {first_line(messages, failure)}") from failure


def _create(
    model: bytes | Path,
    options: QnnOptions,
    entries: Mapping[str, str],
    severity: int,
    name: str,
) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.log_severity_level = severity
    settings.logid = name
    settings.intra_op_num_threads = 1
    for key, value in {"session.disable_cpu_ep_fallback": "1", **entries}.items():
        settings.add_session_config_entry(key, value)
    settings.add_provider_for_devices([_pick(options)], _provider_options(options))
    return ort.InferenceSession(model, settings, enable_fallback=0)


def _provider_options(options: QnnOptions) -> dict[str, str]:
    chosen = {"backend_path": str(backend_library()), "enable_htp_fp16_precision": "1"}
    if options.soc_model is not None:
        chosen["soc_model"] = str(options.soc_model)
    return chosen | dict(options.provider_options)


def _pick(options: QnnOptions) -> ort.OrtEpDevice:
    """The NPU; where there is none, any device of the provider compiles and emulates."""
    devices = _devices()
    npus = [device for device in devices if _is_npu(device)]
    if npus and not options.emulated:
        return npus[0]
    if options.soc_model is None:
        raise DeviceUnavailable("the QNN provider lists no Hexagon NPU on this machine")
    return devices[0]


def _devices() -> list[ort.OrtEpDevice]:
    """The provider's devices. Raises DeviceUnavailable."""
    _register_provider()
    devices = [device for device in ort.get_ep_devices() if device.ep_name == _QNN]
    if not devices:
        raise DeviceUnavailable("the QNN provider finds no device that it could use")
    return devices


@lru_cache(1)
def _register_provider() -> None:
    """Once per process: it must never be taken away while a session lives."""
    library = backend_library()
    import onnxruntime_qnn

    try:
        ort.register_execution_provider_library(_QNN, onnxruntime_qnn.get_library_path())
    except ORT_ERRORS as error:
        reason = str(error).splitlines()[0]
        raise DeviceUnavailable(
            f"the QNN provider in {library.parent} cannot be loaded: {reason}"
        ) from error


def _is_npu(device: ort.OrtEpDevice) -> bool:
    return bool(device.device.type == ort.OrtHardwareDeviceType.NPU)


def _weights_entries(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    return {"session.model_external_initializers_file_folder_path": str(folder) + os.sep}


@contextmanager
def _provider_messages(severity: int) -> Iterator[list[str]]:
    """What ONNX Runtime would print of this severity or worse, instead of its being printed.

    The reasons of the provider are told there and nowhere else. The sink is the process's.
    """
    messages: list[str] = []

    def keep(level: int, category: str, log_id: str, location: str, message: str) -> None:
        messages.append(message)

    with _logging:
        ort.set_default_logger_callback(keep, severity)
        try:
            yield messages
        finally:
            ort.set_default_logger_callback(None)
            ort.set_default_logger_severity(_WARNING)  # the callback has set its own


def _why_refused(
    model: bytes | Path, name: str, options: QnnOptions, entries: Mapping[str, str]
) -> str:
    """Opens it again at the level at which the provider gives its reasons."""
    with _provider_messages(_VERBOSE) as messages, suppress(*ORT_ERRORS):
        _create(model, options, entries, _VERBOSE, name)
    reasons = [f"{node}: {reason}" for node, reason in refusals(messages)]
    return "the QNN provider refuses " + ("; ".join(reasons) or "it without a reason")
