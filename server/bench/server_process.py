"""A server in a child process of its own: started, waited for, looked at, ended by its id.

Knows that a ready server answers a path with 200; nothing else of what it serves.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from server.bench.errors import BenchError

STOP_WITHIN_S = 30.0
_POLL_S = 0.05


class RunningServer:
    """A child process that serves on `port` and is ready when the constructor returns.

    It has a process group of its own, so that the terminal's Ctrl-C reaches only its parent,
    which ends it in order.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        port: int,
        log: Path,
        *,
        ready_path: str = "/health",
        within_s: float = 120.0,
    ) -> None:
        """Raises BenchError with the process's last words if it is not ready in time."""
        self.name, self.port = name, port
        self._log = log.open("wb")
        flags = 0
        if sys.platform == "win32":
            flags = subprocess.CREATE_NEW_PROCESS_GROUP
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=sys.platform != "win32",
            creationflags=flags,
        )
        try:
            self._wait_until_ready(ready_path, within_s)
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self, path: str, within_s: float) -> None:
        url = f"http://127.0.0.1:{self.port}{path}"
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise BenchError(f"{self.name} ended at once: {self._last_words()}")
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_S)
        raise BenchError(f"{self.name} is not ready after {within_s:.0f} s: {self._last_words()}")

    def _last_words(self) -> str:
        return " ".join(Path(self._log.name).read_text(errors="replace")[-500:].split())

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_bytes(self) -> int:
        """Of the process and all its children."""
        return sum(int(process.memory_info().rss) for process in self.processes())

    def processes(self) -> list[psutil.Process]:
        """The process and all its children."""
        main = psutil.Process(self._process.pid)
        return [main, *main.children(recursive=True)]

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_hexlm(folder: Path, *options: str, within_s: float = 120.0) -> RunningServer:
    """`hexlm serve` with these options, as a user starts it; its log goes into `folder`."""
    port = free_port()
    command = [sys.executable, "-m", "server.cli.main", "serve", "--port", str(port), *options]
    log = folder / f"hexlm-{port}.log"
    return RunningServer("hexlm", command, port, log, within_s=within_s)
