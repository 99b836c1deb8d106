"""What is recorded of the machine, its power and its servers' processes."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import psutil
import pytest

from server.bench.errors import BenchError
from server.bench.machine_facts import machine_facts, name_in
from server.bench.metrics_text import MetricsChange, parse_metrics
from server.bench.power import PowerReading, mean_power_w, power_summary, read_power
from server.bench.server_process import RunningServer, free_port
from server.bench.session import model_name


def test_facts_hold_no_names_of_this_machine() -> None:
    text = json.dumps(machine_facts())
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert machine_facts()["versions"].keys() >= {"hexlm", "numba", "onnxruntime"}


def test_a_model_that_is_called_by_its_path_is_recorded_by_its_file() -> None:
    assert model_name("/home/me/models/small.gguf") == "small.gguf"
    assert model_name("C:\\models\\small.gguf") == "small.gguf"
    assert model_name("organisation/small") == "organisation/small"


def test_the_processors_name_is_found_where_the_kernel_tells() -> None:
    assert name_in("processor : 0\nmodel name\t: A Fast One\nflags: x\n") == "A Fast One"
    assert name_in("processor : 0\nBogoMIPS : 38\n") is None


def write_zone(folder: Path, name: str, energy: str) -> None:
    (folder / name).mkdir()
    (folder / name / "energy_uj").write_text(energy)
    (folder / name / "max_energy_range_uj").write_text("1000000\n")


def test_energy_is_that_of_whole_packages(tmp_path: Path) -> None:
    write_zone(tmp_path, "intel-rapl:0", "500\n")
    write_zone(tmp_path, "intel-rapl:0:0", "300\n")
    write_zone(tmp_path, "intel-rapl:1", "not for you\n")
    reading = read_power(tmp_path)
    assert reading.energy_uj == {"intel-rapl:0": 500}


def test_power_is_energy_over_time_even_when_a_counter_wraps() -> None:
    ranges = {"a": 10_000_000, "b": 10_000_000}
    before = PowerReading(0.0, {"a": 1_000_000, "b": 9_000_000}, ranges)
    after = PowerReading(2.0, {"a": 5_000_000, "b": 1_000_000}, ranges)
    assert mean_power_w(before, after) == pytest.approx((4 + 2) / 2)


def test_what_the_platform_does_not_tell_is_not_available() -> None:
    before = PowerReading(0.0, battery_percent=90.0)
    after = PowerReading(9.0, battery_percent=88.0, is_plugged=False)
    summary = power_summary(before, after)
    assert summary["mean_package_power_w"] == "not available"
    assert summary["battery_change_percent"] == -2.0
    assert summary["is_plugged"] is False
    assert summary["hottest_end_c"] == "not available"


METRICS = """\
# HELP hexlm:engine_steps_total Steps.
hexlm:engine_steps_total{model_name="a"} 10.0
hexlm:engine_steps_total{model_name="b"} 5.0
hexlm:step_time_seconds_sum{model_name="a",phase="execute"} 0.5
hexlm:step_time_seconds_sum{model_name="a",phase="sample"} 0.25
hexlm:request_queue_time_seconds_sum{model_name="a"} 1.0
hexlm:request_queue_time_seconds_count{model_name="a"} 2.0
"""


def test_metrics_are_added_up_over_labels_and_divided_by_steps() -> None:
    before, after = parse_metrics(""), parse_metrics(METRICS)
    change = MetricsChange(before, after)
    assert change.num_steps == 15
    assert change.step_s("execute", "sample") == pytest.approx(0.05)
    assert change.queue_s == 0.5
    nothing = MetricsChange(after, after)
    assert (nothing.step_s("execute"), nothing.queue_s) == (None, None)


SERVE = "import http.server, sys; http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"  # noqa: E501


def test_a_child_serves_until_it_is_stopped(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVE, str(port)]
    server = RunningServer("files", command, port, tmp_path / "log", ready_path="/")
    assert server.resident_bytes() > 0
    assert [process.pid for process in server.processes()][0] == server.pid
    server.stop()
    assert not psutil.pid_exists(server.pid)


def test_a_child_that_ends_at_once_says_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no model\\nis given')"]
    with pytest.raises(BenchError, match="dead ended at once: no model is given"):
        RunningServer("dead", command, free_port(), tmp_path / "log")
