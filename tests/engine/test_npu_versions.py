"""Which QAIRT and which chip: read from libraries and from the operating system's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.errors import DeviceUnavailable
from engine.npu import reported_chip as module
from engine.npu.device_config import choose_device
from engine.npu.reported_chip import _cpu_names, _linux_names, reported_chip
from engine.npu.versions import provider_version, qairt_build, qairt_version


def test_the_build_of_qairt_stands_in_its_library(tmp_path: Path) -> None:
    library = tmp_path / "libQnnHtp.so"
    library.write_bytes(b"\0" * 9000 + b"v2.1.3\0v2.51.0.260929181845\0" + b"\xff" * 9000)
    assert qairt_build(library) == "v2.51.0.260929181845"
    assert qairt_version("v2.51.0.260929181845") == "2.51.0"
    assert qairt_version("") == ""


@pytest.mark.parametrize("content", [None, b"", b"no version"])
def test_a_library_without_a_version_is_refused(tmp_path: Path, content: bytes | None) -> None:
    library = tmp_path / "libQnnHtp.so"
    if content is not None:
        library.write_bytes(content)
    with pytest.raises(DeviceUnavailable, match=re.escape(str(library))):
        qairt_build(library)


def test_the_provider_has_a_version_or_a_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.npu.versions.PROVIDER_PACKAGE", "no-such-package-as-this")
    with pytest.raises(DeviceUnavailable, match="pip install"):
        provider_version()


def test_the_names_of_a_linux_machine_are_collected(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_bytes(b"Lenovo ThinkPad T14s Gen 6\0")
    compatible = tmp_path / "compatible"
    compatible.write_bytes(b"lenovo,thinkpad-t14s\0qcom,x1e78100\0qcom,x1e80100\0")
    names = _linux_names((str(model), str(compatible), str(tmp_path / "none")))
    assert names[0] == "Lenovo ThinkPad T14s Gen 6"
    assert names[1] == "lenovo,thinkpad-t14s qcom,x1e78100 qcom,x1e80100"
    assert choose_device(" | ".join(names)).soc_model == 60


def test_processors_are_named_once_each() -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nmodel name\t: Some CPU @ 3 GHz\n"
    assert _cpu_names(cpuinfo) == ["Some CPU @ 3 GHz", "Some CPU @ 3 GHz"]
    assert _cpu_names("Hardware : Qualcomm SC8480XP") == ["Qualcomm SC8480XP"]


def test_the_names_make_one_line_without_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_linux_names", lambda: ["a", "", "b", "a"])
    monkeypatch.setattr(module, "_windows_names", lambda: ["a", "", "b", "a"])
    assert reported_chip() == "a | b"
