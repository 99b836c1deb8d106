"""`hexlm trace` against a server: the file, the table, the picture; `hexlm explain` on the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli.main import run
from server.errors import QueueFull
from server.http_settings import HttpSettings
from tests.server.http_client import app_of, listening
from tests.server.scripted_client import FakeEngine, saying
from tests.traces import traced_step

STEPS = tuple(traced_step(n, prefill=0 if n else 9, wait_ms=0 if n else 2) for n in range(3))


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(saying("abc"))
    engine.traced = STEPS
    return engine


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with listening(app_of(engine, HttpSettings(debug=True))) as url:
        yield url


def failure(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.startswith("hexlm: ")
    return text


def test_a_trace_is_written_summed_up_and_explained(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert run(["trace", "--url", url, "--steps", "3", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "3 steps of fake/model on cpu" in shown
    assert "mean step" in shown and "10 ms" in shown
    assert "https://ui.perfetto.dev" in shown
    assert "3 of" not in shown
    assert json.loads(out.read_bytes())["otherData"]["num_steps"] == 3
    assert run(["explain", str(out)]) == 0
    explained = capsys.readouterr().out
    assert "the mean of 2 steps that decode: bound by" in explained
    assert "the mean of 1 steps with prompts: bound by" in explained
    assert "turn: " in explained


def test_fewer_steps_than_asked_for_are_told(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert run(["trace", "--url", url, "--steps", "9", "--out", str(out)]) == 0
    assert "3 of 9 steps: there were no more in time" in capsys.readouterr().out


def test_a_picture_is_drawn(url: str, tmp_path: Path) -> None:
    out, png = tmp_path / "trace.json", tmp_path / "trace.png"
    assert run(["trace", "--url", url, "--out", str(out), "--png", str(png)]) == 0
    assert png.stat().st_size > 20_000


def test_a_prompt_is_asked_until_the_trace_has_its_steps(
    url: str, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.trace_s = 1.0
    out = tmp_path / "trace.json"
    options = ["--prompt", "Say something.", "--out", str(out), "--steps", "20"]
    assert run(["trace", "--url", url, *options]) == 0
    assert engine.requests, "nothing was asked"
    assert engine.requests[0].sampling.max_tokens == 20


def test_a_prompt_that_is_refused_is_told(
    url: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.trace_s, engine.refusal = 0.6, QueueFull("The queue is full.", 1.0)
    assert run(["trace", "--url", url, "--prompt", "Say something."]) == 1
    assert "The queue is full." in failure(capsys)


def test_an_idle_server_gives_a_hint_and_no_file(
    url: str, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.traced = ()
    out = tmp_path / "trace.json"
    assert run(["trace", "--url", url, "--timeout", "0.5", "--out", str(out)]) == 1
    assert "no step was computed within 0.5 s: send requests" in failure(capsys)
    assert not out.exists()


def test_a_server_without_debug_says_how_to_turn_it_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(app_of(FakeEngine(saying("a")))) as url:
        assert run(["trace", "--url", url, "--out", str(tmp_path / "t.json")]) == 1
    assert "Start the server with --debug" in failure(capsys)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--steps", "0"], 2, "'--steps'"),
        (["--steps", "1001"], 2, "'--steps'"),
        (["--timeout", "900"], 2, "'--timeout'"),
        (["--url", "http://127.0.0.1:9"], 1, "no server answers at http://127.0.0.1:9"),
        (["--url", "nonsense"], 1, "is not a URL"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", *arguments]) == code
    assert message in failure(capsys)


def test_an_unknown_model_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "--url", url, "--model", "nope"]) == 1
    assert "The model 'nope' does not exist" in failure(capsys)


def test_a_file_that_is_neither_is_told_by_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"traceEvents": []}')
    assert run(["explain", str(path)]) == 1
    assert "neither a benchmark nor a trace: it has no steps of hexlm trace" in failure(capsys)
