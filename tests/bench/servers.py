"""The two servers of a comparison: hexlm as a user starts it, and llama.cpp's own server from the
wheel `xllamacpp`, installed once into an environment of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

import platformdirs
import psutil

NUM_THREADS = 2
PEER_PACKAGE = "xllamacpp==2026.10.11549"
_PEER_SCRIPT = """
import signal, sys
import xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.hostnames = ["127.0.0.1"]
parameters.port = int(sys.argv[2])
parameters.n_parallel = int(sys.argv[4])
parameters.n_ctx = 2048 * parameters.n_parallel
parameters.cpuparams.n_threads = int(sys.argv[3])
parameters.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(parameters)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
"""


class RunningServer:
    """A child process that serves on `port`; stopped by its own id."""

    def __init__(self, name: str, command: list[str], port: int, log: Path) -> None:
        self.name, self.port = name, port
        self._log = log.open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        url = f"http://127.0.0.1:{self.port}/health"
        for _ in range(600):
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended at once: {self._last_words()}")
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"{self.name} is not ready after two minutes: {self._last_words()}")

    def _last_words(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-500:]

    def resident_bytes(self) -> int:
        """Of the process and all its children."""
        return sum(process.memory_info().rss for process in self.processes())

    def processes(self) -> list[psutil.Process]:
        """The process and all its children."""
        main = psutil.Process(self._process.pid)
        return [main, *main.children(recursive=True)]

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_hexlm(folder: Path, *options: str) -> RunningServer:
    port = free_port()
    command = [sys.executable, "-m", "server.cli.main", "serve", "--port", str(port)]
    command += ["--threads", str(NUM_THREADS), *options]
    return RunningServer("hexlm", command, port, folder / f"hexlm-{port}.log")


def start_peer(folder: Path, gguf: Path, num_slots: int) -> RunningServer:
    port = free_port()
    command = [str(_peer_python()), "-c", _PEER_SCRIPT, str(gguf), str(port), str(NUM_THREADS)]
    return RunningServer("llama.cpp", [*command, str(num_slots)], port, folder / f"peer-{port}.log")


def _peer_python() -> Path:
    folder = Path(platformdirs.user_cache_dir("hexlm", appauthor=False)) / "bench" / "peer"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    marker = folder / PEER_PACKAGE
    if not marker.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", PEER_PACKAGE]
        subprocess.run(install, check=True)
        marker.touch()
    return python
