"""llama.cpp's own server as the prebuilt wheel `xllamacpp` has it."""

from __future__ import annotations

from pathlib import Path

from server.bench.server_process import RunningServer, free_port
from tests.bench.peers.environment import NUM_THREADS, python_with

NAME = "xllamacpp"
PACKAGE = "xllamacpp==2026.10.11549"
_SCRIPT = """
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


def start(folder: Path, gguf: Path, num_slots: int, context: int) -> RunningServer:
    """`context`: tokens of each slot."""
    port = free_port()
    python = python_with(NAME, [PACKAGE])
    command = [str(python), "-c", _SCRIPT, str(gguf), str(port), str(NUM_THREADS)]
    command += [str(num_slots), str(context)]
    return RunningServer(NAME, command, port, folder / f"{NAME}-{port}.log")
