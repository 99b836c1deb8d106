"""`hexlm compile`: for which chip, with which buckets, and what it says."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from engine.npu import reported_chip
from engine.npu.device_config import load_device
from server.cli.compile import choose_target, with_buckets
from server.cli.errors import CliError
from server.cli.main import run
from tests.tiny_model import import_tiny_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the model `tiny` in it."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    models = tmp_path / "hexlm" / "models"
    models.mkdir(parents=True)
    return import_tiny_model(models).path


def test_a_chip_is_chosen_by_number_by_name_or_as_the_machine_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_target(60, None).name == "x_elite"
    assert choose_target(None, "emulated").name == "emulated"
    monkeypatch.setattr(reported_chip, "reported_chip", lambda: "Snapdragon(R) X2 Elite")
    assert choose_target(None, None).soc_model == 88


@pytest.mark.parametrize(
    ("soc", "device", "message"),
    [
        (77, None, "unknown chip 77; give --soc 60 .* or --soc 88"),
        (88, "x2_elite", "not both"),
        (None, None, "no NPU that hexlm knows; give --soc 60"),
    ],
)
def test_a_chip_that_cannot_be_chosen_is_one_line_with_the_choices(
    monkeypatch: pytest.MonkeyPatch, soc: int | None, device: str | None, message: str
) -> None:
    monkeypatch.setattr(reported_chip, "reported_chip", lambda: "AMD EPYC")
    with pytest.raises(CliError, match=message):
        choose_target(soc, device)


def test_buckets_replace_those_of_the_device() -> None:
    device = load_device("x2_elite")
    assert with_buckets(device, None) is device
    assert with_buckets(device, "4,16").token_buckets == (4, 16)
    assert with_buckets(device, "4,16").head_buckets == device.head_buckets


@pytest.mark.parametrize("buckets", ["", "a", "8,1", "0,1", "1,,2"])
def test_buckets_that_are_none_are_refused(buckets: str) -> None:
    with pytest.raises(CliError, match="ascending positive numbers"):
        with_buckets(load_device("x2_elite"), buckets)


def test_a_model_that_is_not_here_is_one_line(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compile", "nothing", "--soc", "88"]) == 1
    assert capsys.readouterr().err.startswith("hexlm: unknown model 'nothing'")


@pytest.mark.npu
def test_a_model_is_compiled_once_for_another_machine_and_again_by_force(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compile", "tiny", "--soc", "88", "--buckets", "4"]
    (cache / "npu" / "88-2.1.0").mkdir(parents=True)
    assert run(command) == 0
    ready, old = capsys.readouterr().err.splitlines()
    assert ready.startswith("tiny is ready for Snapdragon X2 Elite") and "6 compiled" in ready
    assert old.endswith("is of another QAIRT version and may be deleted")
    assert run(command) == 0
    assert "6 graphs, all there" in capsys.readouterr().err
    assert run([*command, "--force"]) == 0
    assert "6 compiled" in capsys.readouterr().err
