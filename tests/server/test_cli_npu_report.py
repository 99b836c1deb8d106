"""The verb `npu-report`: one file with everything, and a summary that says what it is of."""

from __future__ import annotations

import json
from pathlib import Path

import platformdirs
import pytest

from server.cli.main import run
from server.cli.npu_report import PUBLIC_FIGURES, plan_of
from tests.engine.gguf_files import write_tiny_llama_gguf

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: None) -> str:
    """Of a cache of its own, but for the kernels, which take minutes to compile."""
    kernels_folder = Path(platformdirs.user_cache_dir("hexlm", appauthor=False)) / "kernels"
    cache = tmp_path / "cache"
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: cache / name)
    monkeypatch.setattr("engine.kernels.kernel_cache.default_folder", lambda: kernels_folder)
    assert run(["pull", str(write_tiny_llama_gguf(tmp_path / "tiny.gguf"))]) == 0
    return "tiny"


def test_the_report_is_written_and_summed_up(model: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "report.json"
    arguments = ["npu-report", model, "--device", "cpu", "--short", "--out", str(out)]
    assert run(arguments) == 0
    document = json.loads(out.read_text())
    assert document["model"]["name"] == "tiny" and document["device"]["name"] == "cpu"
    assert len(document["public_figures"]) == len(PUBLIC_FIGURES)
    printed = capsys.readouterr().out
    assert "decodes" in printed and "Genie" in printed and "EMULATED" not in printed
    assert "not measured: everything on the NPU: asked for with --device cpu" in printed


def test_without_an_npu_it_says_so_and_how_to_go_on(
    model: str, tmp_path: Path, capsys: Capture
) -> None:
    capsys.readouterr()
    assert run(["npu-report", model, "--out", str(tmp_path / "report.json")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hexlm: --device npu: ") and "--device auto or cpu" in error


def test_a_file_that_cannot_be_written_is_found_before_measuring(
    model: str, tmp_path: Path, capsys: Capture
) -> None:
    capsys.readouterr()
    out = tmp_path / "none" / "report.json"
    assert run(["npu-report", model, "--device", "cpu", "--out", str(out)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_minutes_are_of_steady_decoding() -> None:
    assert plan_of(short=False, minutes=None).load_s == 180
    assert plan_of(short=True, minutes=0.5).load_s == 30
