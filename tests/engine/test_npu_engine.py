"""Loading with an NPU beside the CPU: who serves when, what is measured, and what is kept."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.dispatcher import CpuDispatcher, Dispatcher
from engine.errors import DeviceFull, DeviceUnavailable
from engine.loader import LoadedEngine, load_engine
from engine.npu import engine as npu_engine
from engine.npu.device_config import load_device
from tests.batches import Span, make_batch
from tests.npu_engine_process import engine_config, load_with_open_npu, simulate
from tests.simulated_lane import Device

LAYERS = 2
BATCH = make_batch([Span([1, 2, 3], [0]), Span([7] * 20, [1, 2])], 9)


@pytest.fixture
def engines() -> Iterator[list[LoadedEngine]]:
    opened: list[LoadedEngine] = []
    yield opened
    for engine in opened:
        if isinstance(engine.runner, Dispatcher):
            engine.runner.close()


def steps(engine: LoadedEngine) -> dict[str, int]:
    return {lane.name: lane.num_steps for lane in engine.runner.usage.lanes}


def test_the_cpu_serves_until_the_npu_is_open(
    tiny_bundle: Bundle, tmp_path: Path, engines: list[LoadedEngine], monkeypatch: Any
) -> None:
    simulate(Device(LAYERS), replace=monkeypatch.setattr)
    may_open, open_forms = threading.Event(), npu_engine.open_forms

    def slowly(*args: Any) -> Any:
        may_open.wait(60)
        return open_forms(*args)

    monkeypatch.setattr(npu_engine, "open_forms", slowly)
    phases: list[str] = []
    engine = load_engine(engine_config(tiny_bundle.path, tmp_path), phases.append)
    engines.append(engine)
    expected = engine.runner.execute(BATCH).copy()
    assert steps(engine) == {"npu": 0, "cpu": 1}
    assert engine.devices.report.lanes[0].state == "opening"
    assert not any("compiling 1" in phase for phase in phases), "that is no phase of loading"
    may_open.set()
    assert engine.runner._opener.wait(60)  # type: ignore[attr-defined]
    assert np.array_equal(engine.runner.execute(BATCH), expected)
    assert steps(engine) == {"npu": 1, "cpu": 1}
    assert engine.devices.report.lanes[0].state == "open"
    assert engine.devices.report.plan.startswith("first: npu (")
    assert engine.info.device == "npu" and engine.info.device_reason == "a simulated NPU"


def test_an_npu_asked_for_by_name_is_open_before_anything_is_served(
    tiny_bundle: Bundle, tmp_path: Path, engines: list[LoadedEngine], monkeypatch: Any
) -> None:
    simulate(Device(LAYERS), is_strict=True, replace=monkeypatch.setattr)
    phases: list[str] = []
    engine = load_engine(engine_config(tiny_bundle.path, tmp_path), phases.append)
    engines.append(engine)
    assert "compiling 1 of 2" in phases and "measuring the NPU" in phases
    engine.runner.execute(BATCH)
    assert steps(engine) == {"npu": 1, "cpu": 0}
    assert engine.devices.report.plan == "all matrix work on npu, as was asked for"


def test_an_npu_asked_for_by_name_that_cannot_be_opened_ends_the_start(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: Any
) -> None:
    simulate(Device(LAYERS), is_strict=True, replace=monkeypatch.setattr)

    def full(*args: Any) -> Any:
        raise DeviceFull("the contexts need 3 GB")

    monkeypatch.setattr(npu_engine, "open_forms", full)
    with pytest.raises(DeviceFull, match="need 3 GB"):
        load_engine(engine_config(tiny_bundle.path, tmp_path), lambda phase: None)


def test_what_was_measured_is_kept_and_not_measured_again(
    tiny_bundle: Bundle, tmp_path: Path, engines: list[LoadedEngine], monkeypatch: Any
) -> None:
    simulate(Device(LAYERS), replace=monkeypatch.setattr)
    config = engine_config(tiny_bundle.path, tmp_path)
    engines.append(load_with_open_npu(config, lambda phase: None))
    assert len(list((tmp_path / "profiles").iterdir())) == 1

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(npu_engine, "measure_npu", never)
    monkeypatch.setattr(npu_engine, "measure_cpu", never)
    again = load_with_open_npu(config, lambda phase: None)
    engines.append(again)
    again.runner.execute(BATCH)
    assert steps(again) == {"npu": 1, "cpu": 0}
    assert "costs measured at start" in again.devices.report.lanes[0].detail


def test_a_place_where_no_lease_can_be_is_refused(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: Any
) -> None:
    simulate(Device(LAYERS), replace=monkeypatch.setattr)
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceUnavailable, match="lease"):
        load_engine(engine_config(tiny_bundle.path, tmp_path / "file"), lambda phase: None)


def test_the_cpu_alone_has_no_threads_and_no_files_of_an_npu(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    before = set(threading.enumerate())
    engine = load_engine(
        engine_config(tiny_bundle.path, tmp_path, device="cpu"), lambda phase: None
    )
    engine.runner.execute(BATCH)
    assert isinstance(engine.runner, CpuDispatcher)
    assert set(threading.enumerate()) == before
    assert list(tmp_path.iterdir()) == []
    report = engine.devices.report
    assert (report.device, report.plan) == ("cpu", "everything on the cpu")


@pytest.mark.npu
def test_the_emulated_npu_computes_what_the_cpu_does_within_its_precision(
    tiny_bundle: Bundle, tmp_path: Path, engines: list[LoadedEngine]
) -> None:
    state = tmp_path / "state"
    bundle = Path(shutil.copytree(tiny_bundle.path, tmp_path / "tiny"))
    on_cpu = load_engine(engine_config(bundle, state, device="cpu"), lambda phase: None).runner
    phases: list[str] = []
    config = engine_config(bundle, state, device="npu-emulated")
    engine = load_engine(config, phases.append)
    engines.append(engine)
    expected = on_cpu.execute(BATCH).copy()
    found = engine.runner.execute(BATCH)
    assert steps(engine) == {"npu-emulated": 1, "cpu": 0}
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    assert difference < 0.1, f"relative difference {difference:.3g}"
    assert any("compiling" in phase for phase in phases)
    assert engine.info.token_buckets == load_device("emulated").token_buckets
