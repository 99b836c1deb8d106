"""Calibration measures every lane there is and keeps what a later start reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.bundle import Bundle
from engine.calibration import calibrate
from engine.cost_profile import KINDS
from engine.dispatcher import Dispatcher
from engine.engine_parts import EngineParts
from engine.errors import BundleError
from engine.loader import load_engine, load_parts
from engine.profile_store import ProfileStore
from tests.npu_engine_process import engine_config


def ignore(phase: str) -> None:
    pass


def test_the_cpu_is_measured_in_whole_steps_and_in_segments(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    phases: list[str] = []
    config = engine_config(tiny_bundle.path, tmp_path, device="cpu", kernels="auto")
    found = calibrate(config, phases.append)
    assert [n for n, _ in found.profile.cpu_step] == [1, 2, 4, 8, 16, 32, 64]
    assert set(found.profile.lanes) == {"cpu"} and found.skipped == ()
    assert set(found.profile.lanes["cpu"].segments) == set(KINDS)
    assert 0 < found.profile.lanes["cpu"].call_overhead_s < 0.1
    assert phases[-1] == "measuring the segments on the cpu"
    key = load_parts(config, ignore).profile_key("cpu")
    stored = ProfileStore(tmp_path / "profiles").load(key)
    assert stored is not None and stored.profile == found.profile
    assert stored.origin == "calibrated"


def test_what_has_no_segments_for_the_cpu_is_calibrated_without_them(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(parts: EngineParts) -> Any:
        raise BundleError("there are no graphs")

    monkeypatch.setattr(EngineParts, "open_cpu_lane", none)
    found = calibrate(engine_config(tiny_bundle.path, tmp_path, device="cpu"), ignore)
    assert found.profile.lanes == {}
    assert found.skipped == ("segments on the cpu: there are no graphs",)


@pytest.mark.npu
def test_the_emulated_npu_is_measured_and_a_later_start_reads_that(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle.path, tmp_path / "tiny"))
    config = engine_config(
        bundle, tmp_path / "state", device="npu-emulated", max_num_batched_tokens=40
    )
    found = calibrate(config, ignore)
    assert set(found.profile.lanes) == {"cpu", "npu-emulated"}
    npu = found.profile.lanes["npu-emulated"]
    assert npu.is_bucketed and [n for n, _ in npu.segments["middle"]] == [1, 2, 4, 8, 16, 32]
    engine = load_engine(config, ignore)
    assert "costs calibrated" in engine.devices.report.lanes[0].detail
    assert isinstance(engine.runner, Dispatcher)
    engine.runner.close()
