"""A model opened on the emulated NPU: compiled once, loaded again, made anew when refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.bundle import Bundle
from engine.embedding import Embedding
from engine.errors import ContextRejected, DeviceUnavailable
from engine.export.model import load_weights
from engine.kv_cache import PagedKVCache
from engine.kv_format import INT8
from engine.npu import opening as npu_opening
from engine.npu.calls import PlainMemory
from engine.npu.device_config import NpuSettings
from engine.npu.lane import NpuLane
from engine.npu.opening import device_config, open_npu, session_options
from engine.npu.qnn_session import SHARED_MEMORY_OPTION, QnnOptions, QnnSession, open_context
from engine.step_form import NpuForms

DEVICE_FILE = """
description = "small"
soc_model = 60
htp_arch = 73
token_buckets = [1, 8]
head_buckets = [2]
perf_mode = "default"
[provider]
enable_htp_fp16_precision = true
enable_htp_shared_memory_allocator = true
[fused]
layers_per_graph = 2
token_buckets = [8]
window_buckets = [16]
"""


class Lease:
    def __init__(self) -> None:
        self.num_taken = 0

    def __enter__(self) -> None:
        self.num_taken += 1

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A copy, which contexts are compiled into."""
    folder = tmp_path_factory.mktemp("opening") / "tiny"
    shutil.copytree(tiny_bundle.path, folder)
    return Bundle.open(folder)


@pytest.fixture
def settings(tmp_path: Path) -> NpuSettings:
    path = tmp_path / "small.toml"
    path.write_text(DEVICE_FILE)
    return NpuSettings(device_file=str(path), fused=True)


def opened(bundle: Bundle, settings: NpuSettings) -> tuple[NpuForms, list[str], Lease]:
    config = bundle.config
    embedding = Embedding(bundle.weights_path, load_weights(bundle.path).embed, 1.0)
    phases: list[str] = []
    lease = Lease()
    forms = open_npu(
        bundle=bundle,
        device="npu-emulated",
        max_tokens=16,
        max_rows=4,
        embedding=embedding,
        cache=PagedKVCache(config, INT8, 4),
        max_model_len=64,
        on_phase=phases.append,
        lease=lease,
        settings=settings,
    )
    return forms, phases, lease


@pytest.mark.npu
def test_contexts_are_compiled_once_and_then_loaded(
    bundle: Bundle, settings: NpuSettings, emulator: None
) -> None:
    forms, phases, lease = opened(bundle, settings)
    num_graphs = 3 * 2 + 1 + 1
    assert f"compiling {num_graphs} of {num_graphs}" in phases
    assert phases[-1] == "loading onto the NPU"
    assert isinstance(forms.lane, NpuLane) and forms.lane.name == "npu-emulated"
    assert [form.name for form in forms.whole] == ["npu-emulated-fused"]
    assert lease.num_taken >= num_graphs
    assert len(forms.lane.sessions) == 3 * 2 + 1
    buffers = forms.lane.begin(3)
    buffers.hidden[:] = 1
    forms.lane.run(0)
    assert buffers.qkv.any()
    forms.close()
    _, phases, _ = opened(bundle, settings)
    assert not any(phase.startswith("compiling 0") for phase in phases)


@pytest.mark.npu
def test_contexts_that_are_refused_are_made_anew_once(
    bundle: Bundle, settings: NpuSettings, emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(bundle, settings)
    refusals = [True]

    def refuse_first(path: Path, options: QnnOptions, shared: bool) -> QnnSession:
        if refusals:
            refusals.pop()
            raise ContextRejected("made for another driver")
        return open_context(path, options, shared)

    monkeypatch.setattr(npu_opening, "open_context", refuse_first)
    forms, phases, _ = opened(bundle, settings)
    assert any(phase.startswith("compiling") for phase in phases)
    assert forms.lane is not None

    def refuse(path: Path, options: QnnOptions, shared: bool) -> QnnSession:
        raise ContextRejected("made for another driver")

    monkeypatch.setattr(npu_opening, "open_context", refuse)
    with pytest.raises(ContextRejected, match="another driver"):
        opened(bundle, settings)


def test_any_device_can_be_emulated_without_what_only_a_chip_has(settings: NpuSettings) -> None:
    config = device_config("npu-emulated", settings)
    options = session_options(config)
    assert config.is_emulated and options.emulated and options.soc_model == 60
    assert dict(options.provider_options) == {"enable_htp_fp16_precision": "1"}


@pytest.mark.parametrize("is_offered", [True, False])
def test_memory_is_shared_only_where_the_provider_lists_some(
    monkeypatch: pytest.MonkeyPatch, is_offered: bool
) -> None:
    memory = PlainMemory() if is_offered else None
    monkeypatch.setattr(npu_opening, "reported_chip", lambda: "Snapdragon(R) X2 Elite - X2E80100")
    monkeypatch.setattr(npu_opening, "find_shared_memory", lambda options: memory)
    options = session_options(device_config("npu", NpuSettings(perf_mode="burst")))
    assert options.soc_model == 88 and not options.emulated
    assert options.provider_options["htp_performance_mode"] == "burst"
    assert options.provider_options[SHARED_MEMORY_OPTION] == str(int(is_offered))


def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_opening, "reported_chip", lambda: "Some Other Chip")
    with pytest.raises(DeviceUnavailable, match="'Some Other Chip'"):
        device_config("npu", NpuSettings())
    with pytest.raises(DeviceUnavailable, match="is the emulator"):
        device_config("npu", NpuSettings(device_file="emulated"))
    with pytest.raises(DeviceUnavailable, match="perf_mode must be one of"):
        device_config("npu-emulated", NpuSettings(perf_mode="turbo"))
