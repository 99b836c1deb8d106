"""`hexlm serve` up to the moment it serves: flags, the port, and failures in one line."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli.main import run
from server.listener import ListenError, base_url, bind, is_loopback, listen_error


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def test_a_taken_port_is_found_before_the_model_is_looked_for(
    taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--port", str(taken_port), "--model", "no-such-model"]) == 1
    assert capsys.readouterr().err == (
        f"hexlm: port {taken_port} on 127.0.0.1 is in use; stop the program that uses it, or "
        f"choose another with --port {taken_port + 1}\n"
    )


def test_an_unknown_config_key_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[engine]\nthread = 2\n", encoding="utf-8")
    assert run(["serve", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "unknown key 'engine.thread'" in error
    assert "did you mean 'engine.threads'?" in error


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--kv-memory", "lots", "--kv-memory must be"),
        ("--threads", "0", "--threads must be"),
        ("--kv-format", "fp8", "--kv-format must be one of auto, f32, int8"),
        ("--device", "gpu", "--device must be one of auto, cpu, npu"),
        ("--max-model-len", "1", "--max-model-len must be"),
        ("--port", "70000", "--port must be an integer from 0 to 65535"),
    ],
)
def test_wrong_flags_are_one_line(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", flag, value]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hexlm: {message}")
    assert error.count("\n") == 1


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "0", "--model", "no-such-model"]) == 1
    error = capsys.readouterr().err
    assert "no-such-model" in error
    assert error.count("\n") == 1


def test_a_host_that_is_not_ours_is_refused_with_the_fix() -> None:
    with pytest.raises(ListenError, match="use --host 127.0.0.1, or 0.0.0.0"):
        bind("192.0.2.1", 0)
    with pytest.raises(ListenError, match="'no such host' is not an address of this machine"):
        bind("no such host", 0)


@pytest.mark.parametrize(
    ("number", "port", "message"),
    [
        (errno.EADDRINUSE, 80, "port 80 on h is in use"),
        (errno.EACCES, 80, "may not listen on port 80 of h; choose one above 1023"),
        (errno.EACCES, 8000, "port 8000 on h is in use"),
        (errno.EADDRNOTAVAIL, 8000, "cannot listen on h: "),
    ],
)
def test_errors_of_the_socket_are_told_apart(number: int, port: int, message: str) -> None:
    error = OSError(number, os.strerror(number))
    assert message in str(listen_error("h", port, error))


def test_a_bound_port_does_not_answer_before_it_listens() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=1.0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("box.local", "http://box.local:80"),
    ],
)
def test_the_url_is_one_that_a_client_on_this_machine_can_use(host: str, url: str) -> None:
    assert base_url(host, 80) == url


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("192.168.0.2", False),
        ("box.local", False),
    ],
)
def test_loopback_addresses_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
