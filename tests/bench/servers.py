"""The two servers of a comparison: hexlm as a user starts it, and llama.cpp's own server from the
wheel `xllamacpp`, installed once into an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import platformdirs

from server.bench import server_process
from server.bench.server_process import RunningServer, free_port

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
parameters.n_ctx = int(sys.argv[5]) * parameters.n_parallel
parameters.cpuparams.n_threads = int(sys.argv[3])
parameters.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(parameters)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
"""


def start_hexlm(folder: Path, *options: str) -> RunningServer:
    return server_process.start_hexlm(folder, "--threads", str(NUM_THREADS), *options)


def start_peer(folder: Path, gguf: Path, num_slots: int, context: int = 2048) -> RunningServer:
    """`context`: tokens of each slot."""
    port = free_port()
    command = [str(_peer_python()), "-c", _PEER_SCRIPT, str(gguf), str(port), str(NUM_THREADS)]
    command += [str(num_slots), str(context)]
    return RunningServer("llama.cpp", command, port, folder / f"peer-{port}.log")


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
