"""Memory that CPU and NPU share: found where the provider lists it, and bound as shared.

No machine of ours has such memory, so the CPU provider's own allocator stands for it here: the
calls into ONNX Runtime are the real ones, and a graph computes on windows of the memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest

from engine.bundle import Bundle
from engine.errors import DeviceFull
from engine.export.model import segment_file
from engine.npu import qnn_session
from engine.npu.qnn_session import QnnOptions, SharedMemory, find_shared_memory
from engine.session import CpuSessions

WANTED = QnnOptions(88, True, {"enable_htp_shared_memory_allocator": "1"})


class FakeDevice:
    def __init__(self, info: ort.OrtMemoryInfo | None) -> None:
        self._info = info

    def memory_info(self, kind: ort.OrtDeviceMemoryType) -> ort.OrtMemoryInfo | None:
        assert kind == ort.OrtDeviceMemoryType.HOST_ACCESSIBLE
        return self._info


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[ort.OrtMemoryInfo | None], None]:
    def offered(info: ort.OrtMemoryInfo | None) -> None:
        monkeypatch.setattr(qnn_session, "_pick", lambda options: FakeDevice(info))

    return offered


@pytest.fixture
def info() -> ort.OrtMemoryInfo:
    CpuSessions(1)  # registers the allocator that this describes
    arena = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    return ort.OrtMemoryInfo("Cpu", arena, 0, ort.OrtMemType.DEFAULT)


def test_it_is_used_where_the_provider_lists_it(
    offer: Callable[[ort.OrtMemoryInfo | None], None], info: ort.OrtMemoryInfo
) -> None:
    offer(info)
    assert isinstance(find_shared_memory(WANTED), SharedMemory)
    assert find_shared_memory(QnnOptions(88, True)) is None


def test_it_is_not_used_where_the_provider_lists_none(
    offer: Callable[[ort.OrtMemoryInfo | None], None],
) -> None:
    offer(None)
    assert find_shared_memory(WANTED) is None


def test_a_graph_computes_on_windows_of_it(info: ort.OrtMemoryInfo, tiny_bundle: Bundle) -> None:
    config = tiny_bundle.config
    session = CpuSessions(1).open(tiny_bundle.path / segment_file(0))
    memory = SharedMemory(info)
    hidden = memory.allocate(12, config.hidden_size)
    qkv = memory.allocate(12, config.qkv_size)
    assert not hidden.any() and hidden.shape == (1, 12, config.hidden_size)
    hidden[:] = np.random.default_rng(0).standard_normal(hidden.shape)

    expected = np.zeros((1, 8, config.qkv_size), np.float32)
    plain = session.binding()
    plain.bind_input("hidden", np.ascontiguousarray(hidden[:, 4:]))
    plain.bind_output("qkv", expected)
    shared = memory.binding(session)
    shared.bind_input("hidden", hidden[:, 4:])
    shared.bind_output("qkv", qkv[:, 4:])
    for binding in (plain, shared):
        binding.run()
    assert expected.any() and np.array_equal(qkv[:, 4:], expected)
    assert not qkv[:, :4].any()


def test_memory_that_cannot_be_had_is_an_error() -> None:
    kind, where = ort.OrtDeviceMemoryType.HOST_ACCESSIBLE, ort.OrtMemoryInfoDeviceType.NPU
    allocator = ort.OrtAllocatorType.ORT_DEVICE_ALLOCATOR
    nowhere = ort.OrtMemoryInfo.create_v2("Nowhere", where, 0, 7, kind, 0, allocator)
    with pytest.raises(DeviceFull, match="no shared memory for 128 bytes"):
        SharedMemory(nowhere).allocate(4, 8)
