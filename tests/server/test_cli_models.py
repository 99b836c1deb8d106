"""The verbs pull, list, show and rm, and how every failure looks on the command line."""

from __future__ import annotations

import errno
import io
import re
from pathlib import Path

import platformdirs
import pytest
import typer
from rich.console import Console

from engine.errors import BundleError, ImportFailed
from engine.export import measured_width
from engine.version import own_version
from server.bench.kv_use import kv_bytes_per_token
from server.cli.errors import CliError, Failure, translate
from server.cli.main import create_app, run
from server.cli.progress import progress_bars
from server.config import ConfigError
from server.sources.errors import UnknownModel
from tests.engine.gguf_files import write_tiny_llama_gguf
from tests.model_configs import make_config

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: folder / name)
    return folder / "hexlm"


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(write_tiny_llama_gguf(tmp_path / "tiny.gguf"))


def failure(capsys: Capture, *arguments: str) -> tuple[int, str]:
    """(exit code, the one line on stderr); nothing is printed elsewhere."""
    capsys.readouterr()
    code = run(arguments)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("hexlm: ")
    return code, output.err


def test_pull_imports_and_list_shows_the_numbers(capsys: Capture, source: str, cache: Path) -> None:
    assert run(["pull", source]) == 0
    ready = rf"tiny is ready \(0\.\d MB\) in {re.escape(str(cache / 'models' / 'tiny'))}"
    assert re.search(ready, capsys.readouterr().err)
    assert run(["list"]) == 0
    heading, row, *others = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        "name",
        "kind",
        "size",
        "quantization",
        "architecture",
        "context",
        "path",
    ]
    assert row.split() == [
        *(["tiny", "generation", "0.3", "MB", "Q4_1", "→", "int4", "llama", "512"]),
        str(cache / "models" / "tiny"),
    ]
    pulls = [line.rpartition("run ")[2] for line in others]
    assert pulls == [
        "`hexlm pull all-minilm-l6-v2`",
        "`hexlm pull gemma3-270m`",
        "`hexlm pull smollm2-135m-instruct`",
    ]


def test_show_has_the_numbers_of_the_model(capsys: Capture, source: str) -> None:
    run(["pull", source, "--name", "mine"])
    capsys.readouterr()
    assert run(["show", "mine"]) == 0
    lines = [
        re.split(r"\s{2,}", line.strip(), maxsplit=1)
        for line in capsys.readouterr().out.splitlines()
    ]
    shown = {line[0]: line[1] for line in lines}
    assert shown["name"] == "mine"
    assert shown["heads"] == "3, 1 for keys and values"
    assert shown["quantization"] == "Q4_1 in the file, int4 here"
    assert shown["end tokens"] == "2, 0"
    assert shown["BOS token"] == "1, not added to prompts"
    assert shown["KV cache, int8"] == f"{2 * 2 * (32 + 4)} bytes per token"


def test_show_says_why_weights_take_so_many_bits(
    capsys: Capture, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_width, "MIN_WEIGHTS", 1)
    run(["pull", source])
    capsys.readouterr()
    assert run(["show", "tiny"]) == 0
    found = re.search(
        r"^bits in memory +([48]): the matrix products", capsys.readouterr().out, re.M
    )
    assert found is not None


def test_kv_bytes_count_scales_of_heads_and_groups() -> None:
    config = make_config(num_layers=30, num_heads=9, num_kv_heads=3, head_size=64)
    heads = 2 * 30 * 3
    assert kv_bytes_per_token(config) == {
        "f32": heads * 260,
        "int8": heads * 68,
        "int8k4v": heads // 2 * (68 + 40),
        "int4": heads * (32 + 8),
    }


def test_a_damaged_model_is_listed_with_its_problem(
    capsys: Capture, source: str, cache: Path
) -> None:
    run(["pull", source])
    (cache / "models" / "tiny" / "weights.bin").unlink()
    capsys.readouterr()
    assert run(["list"]) == 0
    assert "damaged" in capsys.readouterr().out
    code, line = failure(capsys, "show", "tiny")
    assert (code, "run `hexlm pull tiny --force`" in line) == (1, True)
    assert run(["pull", "tiny", "--force"]) == 0


def test_rm_deletes_after_a_yes_only(
    capsys: Capture, source: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(["pull", source])
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert run(["rm", "tiny"]) == 1
    assert "tiny was kept; give --yes" in capsys.readouterr().err
    assert (cache / "models" / "tiny").is_dir()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run(["rm", "tiny"]) == 0
    assert not (cache / "models" / "tiny").exists()


def test_rm_without_anybody_to_ask_deletes_nothing(
    capsys: Capture, source: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(["pull", source])
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["rm", "tiny"]) == 1
    assert (cache / "models" / "tiny").is_dir()
    assert run(["rm", "tiny", "--yes"]) == 0
    assert not (cache / "models" / "tiny").exists()


@pytest.mark.parametrize("verb", ["pull", "show", "rm"])
def test_an_unknown_model_is_one_line_that_lists_the_known(capsys: Capture, verb: str) -> None:
    code, line = failure(capsys, verb, "nope")
    assert code == 1
    assert "unknown model 'nope'; known: all-minilm-l6-v2, " in line


def test_a_bad_file_is_one_line(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "a\nb.gguf").write_bytes(b"<html>")
    code, line = failure(capsys, "pull", str(tmp_path / "a\nb.gguf"))
    assert (code, "is an HTML page" in line) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["pull"], "Missing argument"),
        (["pull", "x", "--colour"], "No such option"),
    ],
)
def test_a_wrong_command_line_ends_with_2(capsys: Capture, arguments: list[str], said: str) -> None:
    code, line = failure(capsys, *arguments)
    assert code == 2
    assert said in line
    assert "--help`" in line


def test_every_verb_is_registered_and_has_a_help_text() -> None:
    commands = create_app().registered_commands
    names = [command.name for command in commands]
    assert names[:6] == ["serve", "chat", "pull", "list", "show", "rm"]
    assert {"compile", "doctor"} <= set(names) and len(names) == len(set(names))
    assert all(command.callback is not None and command.callback.__doc__ for command in commands)


def test_the_version_is_shown_without_a_verb(capsys: Capture) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"hexlm {own_version()}\n"


def test_help_ends_with_0(capsys: Capture) -> None:
    assert run(["pull", "--help"]) == 0
    assert "--force" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (KeyboardInterrupt(), Failure("interrupted", 130)),
        (typer.Abort(), Failure("interrupted", 130)),
        (ImportFailed("bad\nfile"), Failure("bad file", 1)),
        (BundleError("damaged"), Failure("damaged", 1)),
        (UnknownModel("who?"), Failure("who?", 1)),
        (CliError("no server"), Failure("no server", 1)),
        (ConfigError("unknown key"), Failure("unknown key", 2)),
        (BrokenPipeError(), Failure(None, 1)),
        (OSError(errno.ENOSPC, "x"), Failure("the disk is full; make room and try again", 1)),
        (FileNotFoundError(2, "No such file", "a"), Failure("No such file: a", 1)),
    ],
)
def test_each_kind_of_error_has_its_line_and_code(error: BaseException, failure: Failure) -> None:
    assert translate(error) == failure


def test_ports_and_permissions_have_advice() -> None:
    assert "choose another with --port" in str(translate(OSError(errno.EADDRINUSE, "x")).message)
    denied = translate(PermissionError(errno.EACCES, "denied", "/cache"))
    assert "no permission for /cache" in str(denied.message)


def test_an_unforeseen_error_is_one_line_without_a_traceback() -> None:
    message = translate(RuntimeError("two\nlines")).message
    assert message is not None
    assert message.startswith("internal error (RuntimeError: two lines)")


def test_progress_is_drawn_on_a_terminal_and_silent_elsewhere() -> None:
    terminal, pipe = io.StringIO(), io.StringIO()
    for stream, is_terminal in ((terminal, True), (pipe, False)):
        console = Console(file=stream, force_terminal=is_terminal, width=80)
        with progress_bars(console) as report:
            report("download", 0, 0)
            report("import", 1, 2)
    assert "downloading" in terminal.getvalue()
    assert "importing" in terminal.getvalue()
    assert pipe.getvalue() == ""
