"""Configuration: the documented file equals the code, flags win, and what is wrong is named."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from server import machine
from server.config import (
    ConfigError,
    ServerConfig,
    known_keys,
    load_config,
    read_api_keys,
)

DOCUMENTED = Path(str(files("configs"))) / "server.toml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "server.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_documented_defaults_are_the_defaults_of_the_code() -> None:
    assert load_config(DOCUMENTED) == ServerConfig() == load_config()


def test_documented_file_has_every_key_in_the_order_of_the_code() -> None:
    document = tomllib.loads(DOCUMENTED.read_text(encoding="utf-8"))
    keys = tuple(f"{table}.{key}" for table, values in document.items() for key in values)
    assert keys == known_keys()


def test_key_names_are_unique_over_all_tables_so_that_flags_need_no_table() -> None:
    names = [key.partition(".")[2] for key in known_keys()]
    assert len(names) == len(set(names))


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = 9000\nhost = '0.0.0.0'\n")
    config = load_config(path, {"port": 9001, "host": None})
    assert (config.server.port, config.server.host) == (9001, "0.0.0.0")
    assert config.scheduler == ServerConfig().scheduler


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nkv_memroy = 1", "unknown key 'engine.kv_memroy'"),
        ("[engine]\nkv_memroy = 1", "did you mean 'engine.kv_memory'?"),
        ("[server]\nkv_memory = 1", "did you mean 'engine.kv_memory'?"),
        ("port = 1", "did you mean 'server.port'?"),
        ("[serverr]\nport = 1", "did you mean 'server'?"),
        ("[models]\ntool_parsers = { m = 'x' }", "a table with values of generic, hermes"),
        ("[zzzzqqq]", "tables are server, models, engine, npu, scheduler"),
    ],
)
def test_unknown_keys_are_named_with_the_nearest_known_one(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("port", 65536, "--port must be an integer from 0 to 65535; it is 65536"),
        ("port", True, "--port must be an integer from 0 to 65535; it is True"),
        ("host", 1, "--host must be a string; it is 1"),
        (
            "kv_format",
            "int3",
            "--kv-format must be one of auto, f32, int8, int8k4v, int4; it is 'int3'",
        ),
        ("threads", 0, '--threads must be "auto" or an integer from 1 to 1024; it is 0'),
        ("threads", "many", '--threads must be "auto" or an integer from 1 to 1024; it is'),
        ("kv_memory", "2 gallons", '--kv-memory must be "auto" or a size such as "2GiB"'),
        ("kv_memory", "0", '--kv-memory must be "auto" or a size such as "2GiB"'),
        ("drain_timeout_s", -1, "a number of seconds, at least 0; it is -1"),
        ("drain_timeout_s", float("nan"), "a number of seconds, at least 0; it is nan"),
        ("enable_prefix_caching", 1, "must be true or false; it is 1"),
        ("api_keys", [1], "must be a string or a list of strings"),
        ("aliases", {"a": 1}, "must be a table of strings"),
    ],
)
def test_wrong_values_are_refused_with_what_would_be_right(
    key: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags={key: value})
    assert message in str(caught.value)


def test_a_step_must_have_room_for_more_tokens_than_seats() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(64\) must exceed .* \(64\)"):
        load_config(flags={"max_num_seqs": 64, "max_num_batched_tokens": 64})


def test_a_wrong_value_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = 'x'\n")
    with pytest.raises(ConfigError, match="server.port in .*server.toml must be an integer"):
        load_config(path)


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        ("2GiB", 2 * 1024**3),
        ("2GB", 2 * 1000**3),
        ("1.5 MiB", 3 * 512 * 1024),
        (4096, 4096),
        ("4096", 4096),
        ("1 B", 1),
        ("auto", None),
    ],
)
def test_memory_sizes_are_read_with_their_units(given: Any, num_bytes: int | None) -> None:
    assert load_config(flags={"kv_memory": given}).engine.kv_memory == num_bytes


def test_a_single_model_may_be_given_as_a_string(tmp_path: Path) -> None:
    path = write(tmp_path, "[models]\nmodel = 'tiny'\n")
    assert load_config(path).models.model == ("tiny",)
    assert load_config(path, {"model": ["a", "b"]}).models.model == ("a", "b")


def test_files_that_are_missing_or_broken_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(write(tmp_path, "[server\n"))


def test_api_keys_come_from_the_list_and_the_file(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# ours\nalpha\n\n  beta  \n", encoding="utf-8")
    config = load_config(flags={"api_keys": ["first"], "api_key_file": str(key_file)})
    assert read_api_keys(config.server) == ("first", "alpha", "beta")


def test_an_api_key_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no key"):
        read_api_keys(load_config(flags={"api_key_file": str(key_file)}).server)


def test_detected_threads_are_within_what_the_process_may_use() -> None:
    detected = machine.detect_threads()
    assert 1 <= detected.value <= machine._allowed_cpus()
    assert "physical cores" in detected.reason


def test_detected_kv_memory_is_a_stated_share_divided_by_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 8 * 1024**3)
    assert machine.detect_kv_memory(2) == machine.Detected(
        1024**3, "25% of 8.0 GiB available memory, shared by 2 models"
    )
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 0)
    assert machine.detect_kv_memory().value == machine.MIN_KV_MEMORY_BYTES


def test_a_container_limit_bounds_the_available_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text("1000000\n", encoding="ascii")
    (tmp_path / "memory.current").write_text("400000\n", encoding="ascii")
    (tmp_path / "cpu.max").write_text("150000 100000\n", encoding="ascii")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.available_memory_bytes() == 600_000
    assert machine._cgroup_cpu_quota() == 2
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert machine.available_memory_bytes() > 600_000


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(5, "5 B"), (2048, "2 KiB"), (3 * 1024**3 // 2, "1.5 GiB")]
)
def test_bytes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert machine.format_bytes(num_bytes) == text
