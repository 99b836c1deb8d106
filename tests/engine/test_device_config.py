"""Device files: what is packaged, how a chip finds its own, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import DeviceUnavailable
from engine.npu.device_config import (
    DeviceConfig,
    FusedForm,
    choose_device,
    load_device,
    packaged_devices,
    parse_device,
)

MINIMAL = """
description = "a chip"
soc_model = 88
htp_arch = 81
token_buckets = [1, 8]
head_buckets = [1]
perf_mode = "burst"
"""


def parse(text: str) -> DeviceConfig:
    return parse_device(text, "mine", "mine.toml")


def test_the_packaged_devices_are_the_two_chips_and_the_emulator() -> None:
    chips = {config.name: (config.soc_model, config.htp_arch) for config in packaged_devices()}
    assert chips == {"emulated": (88, 81), "x2_elite": (88, 81), "x_elite": (60, 73)}
    assert [config.name for config in packaged_devices() if config.is_emulated] == ["emulated"]


@pytest.mark.parametrize("config", packaged_devices(), ids=lambda config: config.name)
def test_a_packaged_device_can_be_loaded_by_its_name(config: DeviceConfig) -> None:
    assert load_device(config.name) == config
    assert config.token_buckets[0] == config.head_buckets[0] == 1


@pytest.mark.parametrize("name", ["x2_elite", "x_elite", "emulated"])
def test_every_key_of_a_packaged_file_is_explained(name: str) -> None:
    """Where a key comes first in a paragraph, a comment stands above it; x2_elite has all keys."""
    folder = Path(__file__).parent.parent.parent / "configs" / "devices"
    lines = (folder / f"{name}.toml").read_text("utf-8").splitlines()
    assert lines[0].startswith("#")
    if name == "x2_elite":
        for above, line in zip(lines, lines[1:], strict=False):
            if line.startswith(("vtcm", "ext", "rpc", "htp_g", "htp_r", "enable", "perf_mode")):
                assert above.startswith("#"), line


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("Snapdragon(R) X2 Elite Extreme - X2E96100 - Qualcomm(R) Oryon(TM) CPU", "x2_elite"),
        ("Snapdragon(R) X Elite - X1E78100 - Qualcomm(R) Hexagon(TM) NPU", "x_elite"),
        ("SNAPDRAGON(R) X PLUS - X1P42100", "x_elite"),
        ("SC8480XP", "x2_elite"),
    ],
)
def test_a_chip_finds_its_file_by_the_name_it_reports(reported: str, name: str) -> None:
    assert choose_device(reported).name == name


def test_an_unknown_chip_is_refused_with_its_name() -> None:
    with pytest.raises(DeviceUnavailable, match=r"'SM8250'.*x2_elite, x_elite.*device_file"):
        choose_device(" SM8250 ")


def test_the_options_are_the_text_that_the_provider_reads() -> None:
    config = load_device("x2_elite")
    assert config.provider_options["extended_udma"] == "1"
    assert config.provider_options["vtcm_mb"] == "8"
    assert config.provider_options["htp_performance_mode"] == "sustained_high_performance"
    assert config.run_options == {}
    assert "extended_udma" not in load_device("x_elite").provider_options


def test_modes_of_every_run_are_run_options() -> None:
    config = parse(MINIMAL + 'run_perf_mode = "burst"\npost_run_perf_mode = "power_saver"\n')
    assert config.run_options == {
        "qnn.htp_perf_mode": "burst",
        "qnn.htp_perf_mode_post_run": "power_saver",
    }


def test_what_is_optional_can_be_left_out() -> None:
    config = parse(MINIMAL)
    assert config.reported_names == ()
    assert config.fused == FusedForm(0, (), ())
    assert config.provider_options == {"htp_performance_mode": "burst"}


def test_a_file_of_the_users_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(MINIMAL)
    assert load_device(str(path)).name == "tuned"


def test_mode_and_buckets_can_be_overridden() -> None:
    config = load_device("x_elite").with_perf_mode("burst").with_buckets([2, 4], [1])
    assert config.provider_options["htp_performance_mode"] == "burst"
    assert (config.token_buckets, config.head_buckets) == ((2, 4), (1,))
    with pytest.raises(DeviceUnavailable, match="one of burst, .*, not 'turbo'"):
        config.with_perf_mode("turbo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("soc = 88", "unknown key soc; did you mean soc_model"),
        ("[provider]\nvtcm = 8", "unknown key provider.vtcm; did you mean provider.vtcm_mb"),
        ("[provider]\nbackend_path = 'x'", "unknown key provider.backend_path"),
        ("[provider]\nvtcm_mb = true", "provider.vtcm_mb must be of type int, not True"),
        ("[provider]\nextended_udma = 1", "provider.extended_udma must be of type bool, not 1"),
        ("run_perf_mode = 'turbo'", "one of burst"),
        ("reported_names = 'x'", "reported_names must be a list"),
        ("[fused]\nlayers_per_graph = 2", "fused.token_buckets is missing"),
        ("[fused]\nlayers = 2", "unknown key fused.layers"),
        ("x = ", "Invalid value"),
    ],
)
def test_wrong_files_are_refused(change: str, message: str) -> None:
    with pytest.raises(DeviceUnavailable, match="the device file mine.toml is wrong: ") as caught:
        parse(MINIMAL + change)
    assert message in str(caught.value)


@pytest.mark.parametrize("buckets", ["[]", "[8, 1]", "[1, 1]", "[0]", "[true]", "8", "'8'"])
def test_wrong_buckets_are_refused(buckets: str) -> None:
    with pytest.raises(DeviceUnavailable, match="mine.toml is wrong"):
        parse(MINIMAL.replace("[1, 8]", buckets))


def test_a_missing_key_is_named() -> None:
    with pytest.raises(DeviceUnavailable, match="soc_model is missing"):
        parse(MINIMAL.replace("soc_model = 88", ""))


def test_an_unknown_name_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="use one of emulated, x2_elite, x_elite"):
        load_device("x3")
    with pytest.raises(DeviceUnavailable, match="cannot be read"):
        load_device(str(tmp_path / "none.toml"))
