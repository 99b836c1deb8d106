"""`hexlm calibrate`: what it shows, and that it is told what `hexlm serve` is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from engine.bundle import Bundle
from engine.calibration import Calibration
from engine.cost_profile import LaneCosts, WholeCosts
from engine.placement import Placement
from server.cli.calibrate import report
from server.cli.main import run
from server.model_store import ModelStore
from tests.simulated_lane import flat, profile

COSTS = replace(
    profile(4, npu_s=1e-3, cpu_s=2e-3), whole={"npu-fused": WholeCosts(((8, 256, 7e-3),))}
)


def text_of(found: Calibration) -> str:
    console = Console(width=400)
    with console.capture() as capture:
        console.print(report(found))
    return capture.get()


def words_of(found: Calibration) -> str:
    """Long titles are broken to the width of their tables."""
    return " ".join(text_of(found).split())


def test_it_shows_every_lane_the_attention_the_plan_and_where_it_is_kept() -> None:
    placement = Placement("npu", "found")
    text = words_of(Calibration(placement, COSTS, Path("kept.json"), ("this: for that reason",)))
    for shown in (
        "device: npu (found)", "segments on cpu (an empty call: 1000 us)",
        "segments on npu (an empty call: 500 us)", "8, npu-fused, context 256", "7 ms",
        "attention of one layer", "copies between lanes: 10.0 GB/s", "from thread to thread: 10 us",
        "not measured: this: for that reason", "plan: first: npu (512 rows: cpu 2 ms, npu 1 ms)",
        "kept in kept.json",
    ):  # fmt: skip
        assert shown in text


def test_sizes_that_were_not_measured_are_left_empty() -> None:
    few = {kind: flat(1e-3) for kind in ("first", "middle")} | {"last": ((1, 2e-3),)}
    lane = LaneCosts(1e-4, {**few, "head": ((1, 3e-3),)}, is_bucketed=False)
    costs = replace(COSTS, lanes={"cpu": lane}, whole={})
    text = text_of(Calibration(Placement("cpu", "asked for"), costs, Path("kept.json"), ()))
    row = next(line for line in text.splitlines() if "1024" in line and "1 ms" in line)
    assert row.split("│")[4].strip() == row.split("│")[5].strip() == ""
    assert "plan: everything on the cpu" in text


def test_it_measures_a_model_that_is_here(
    tiny_bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ModelStore, "open", lambda store, name: tiny_bundle)
    monkeypatch.setattr("engine.calibration.state_folder", lambda folder: tmp_path)
    config = tmp_path / "config.toml"
    config.write_text(
        '[engine]\nthreads = 1\nkv_memory = "4MiB"\nmax_model_len = 128\n'
        "[scheduler]\nmax_num_seqs = 4\nmax_num_batched_tokens = 16\n"
    )
    assert run(["calibrate", "tiny", "--config", str(config), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "device: cpu (asked for with --device cpu)" in shown
    assert "segments on cpu" in shown and "kept in" in shown
    assert len(list((tmp_path / "profiles").iterdir())) == 1


def test_a_wrong_device_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "tiny", "--device", "gpu"]) == 2
    assert "device" in capsys.readouterr().err
