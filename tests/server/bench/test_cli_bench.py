"""The verbs bench and explain: a real server behind a socket, wrong options, Ctrl-C, files."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import psutil
import pytest
from rich.console import Console

from server.bench import session
from server.bench.errors import BenchError
from server.bench.results import FigureKey, Results, read_results, to_json
from server.bench.roofline_record import roofline_record
from server.bench.run import Progress
from server.bench.session import BenchSettings
from server.cli import bench as verb
from server.cli.main import run
from tests.engine.gguf_files import write_tiny_llama_gguf
from tests.server.bench.test_explanation import MACHINE, decode_results
from tests.server.http_client import app_of, listening
from tests.server.scripted_client import FakeEngine, saying

Capture = pytest.CaptureFixture[str]
KEY = FigureKey("prefill", "512 tokens", "TTFT", "ms", True, 512, "prompt tokens")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """An application that says "hello" to everybody, in chunks of a letter."""
    with listening(app_of(FakeEngine(saying("hello")))) as address:
        yield address


def bench(*arguments: str) -> int:
    return run(["bench", "--quick", "--no-roofline", *arguments])


def failure(capsys: Capture, code: int) -> str:
    """The one line on stderr of a command that ended with 1."""
    assert code == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_a_server_is_measured_and_everything_is_written(
    url: str, tmp_path: Path, capsys: Capture
) -> None:
    out, markdown = tmp_path / "run.json", tmp_path / "run.md"
    arguments = ["--url", f"{url}/v1", "--suite", "prefill", "--rounds", "1", "--seed", "5"]
    assert bench(*arguments, "--out", str(out), "--markdown", str(markdown)) == 0
    results = read_results(out)
    assert results.is_complete
    assert results.settings["seed"] == 5
    assert {key.suite for key in results.figures} == {"prefill"}
    assert url.removeprefix("http://") not in out.read_text()
    assert "| 128 tokens | TTFT | ms |" in markdown.read_text()
    assert "128 tokens" in capsys.readouterr().out
    assert bench(*arguments, "--compare", str(out)) == 0
    assert "against the older run" in capsys.readouterr().out


def test_two_servers_are_compared(url: str, capsys: Capture) -> None:
    assert bench("--url", url, "--peer", url, "--suite", "prefill", "--rounds", "1") == 0
    assert "server is better by" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_keeps_and_writes_what_is_done(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    @contextlib.contextmanager
    def interrupting(console: Console) -> Iterator[Progress]:
        def report(what: str, done: int, total: int) -> None:
            if done == 2:
                signal.raise_signal(signal.SIGINT)

        yield report

    monkeypatch.setattr(verb, "bench_progress", interrupting)
    out = tmp_path / "run.json"
    code = bench("--url", url, "--suite", "decode", "--rounds", "1", "--out", str(out))
    assert code == 130
    results = read_results(out)
    assert not results.is_complete
    assert {key.case for key in results.figures} == {"context 64, 16 new"}
    assert "the run was ended early" in capsys.readouterr().out


def test_a_server_that_fails_in_the_middle_is_an_error_after_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(settings: BenchSettings, results: Results, progress: Progress) -> None:
        results.targets["hexlm"] = {"kind": "hexlm"}
        results.add(KEY, "hexlm", 12.0, is_warm_up=False)
        raise BenchError("the server is gone")

    monkeypatch.setattr(session, "run_bench", fail)
    out = tmp_path / "run.json"
    code = bench("--url", "http://127.0.0.1:1", "--out", str(out))
    assert failure(capsys, code) == "hexlm: the server is gone\n"
    assert read_results(out).figures[KEY]["hexlm"].rounds == [12.0]


def test_nobody_at_the_url_is_one_line(capsys: Capture) -> None:
    line = failure(capsys, bench("--url", "http://127.0.0.1:1", "--suite", "prefill"))
    assert line == "hexlm: nobody answers at the URL of the server; is it up?\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give either MODEL, to serve and measure it, or --url"),
        (["a-model", "--url", "http://x"], "give either MODEL"),
        (["--url", "http://x", "--kv-format", "int4"], "--kv-format is for a server that is"),
        (["--url", "x"], "x is no URL"),
        (["--url", "http://x", "--suite", "speed"], "there is no suite 'speed'; the suites are"),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_wrong_options_are_said_before_anything_runs(
    arguments: list[str], reason: str, capsys: Capture
) -> None:
    assert reason in failure(capsys, bench(*arguments))


def test_an_older_file_that_is_none_is_said_first(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "old.json"
    path.write_text("{}")
    line = failure(capsys, bench("--url", "http://x", "--compare", str(path)))
    assert "not what `hexlm bench --out` writes" in line


def test_plots_without_matplotlib_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = failure(capsys, bench("--url", "http://x", "--plots", str(tmp_path)))
    assert "pip install 'hexlm[plots]'" in line


def write(path: Path, document: Any) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_explain_says_what_bounds_a_benchmark(tmp_path: Path, capsys: Capture) -> None:
    results = decode_results()
    results.roofline = {"begin": roofline_record(MACHINE)}
    assert run(["explain", write(tmp_path / "run.json", to_json(results))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "decode, context 64, 128 new: bound by memory bandwidth"
    assert "of the limit" in lines[1]
    assert lines[2].startswith("  turn: ")
    assert len(lines) == 3 * 4


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "is not JSON"), ("{}", "neither a benchmark nor a trace")]
)
def test_explain_refuses_other_files(
    text: str, reason: str, tmp_path: Path, capsys: Capture
) -> None:
    assert reason in failure(capsys, run(["explain", write(tmp_path / "x.json", text)]))


def test_explain_of_nothing_says_what_to_give(capsys: Capture) -> None:
    assert "or --machine" in failure(capsys, run(["explain"]))


def test_a_model_is_served_measured_and_its_server_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    model, out = str(write_tiny_llama_gguf(tmp_path / "tiny.gguf")), tmp_path / "run.json"
    before = {child.pid for child in psutil.Process().children()}
    options = ["--threads", "1", "--kv-format", "int4", "--kv-memory", "64MiB"]
    suites = ["--suite", "prefill", "--suite", "memory", "--rounds", "1"]
    assert bench(model, *suites, *options, "--out", str(out)) == 0
    assert {child.pid for child in psutil.Process().children()} <= before
    results = read_results(out)
    assert results.notes == []
    target = results.targets["hexlm"]
    assert (target["kind"], target["num_threads"], target["kv_format"]) == ("hexlm", 1, "int4")
    assert (target["speculation"], target["max_num_seqs"]) == ("auto", 32)
    assert target["cost"]["kv_bytes_per_token"]["int8"] == 144
    assert {key.suite for key in results.figures} == {"start", "prefill", "memory"}
    assert str(tmp_path) not in out.read_text()
    assert run(["explain", str(out)]) == 0
    assert "prefill, 128 tokens: bound by unknown" in capsys.readouterr().out


def test_a_wrong_option_of_serve_is_refused_as_serve_does(capsys: Capture) -> None:
    assert bench("a-model", "--kv-format", "int5") == 2
    assert "--kv-format must be" in capsys.readouterr().err
