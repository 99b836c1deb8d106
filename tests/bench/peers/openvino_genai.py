"""OpenVINO GenAI, which reads the GGUF file itself, behind `completions_http`.

The pipeline with continuous batching and shared prefixes; a server for one reader takes a whole
prompt in one step.
"""

from __future__ import annotations

from pathlib import Path

from server.bench.server_process import RunningServer, free_port
from tests.bench.peers.environment import NUM_THREADS, module_command, python_with

NAME = "openvino-genai"
PACKAGES = ("openvino-genai==2026.4.1.0", "openvino==2026.4.1")


def start(folder: Path, gguf: Path, num_slots: int, context: int) -> RunningServer:
    port = free_port()
    numbers = [str(each) for each in (port, NUM_THREADS, num_slots, context)]
    python = python_with(NAME, PACKAGES)
    command = module_command(python, "tests.bench.peers.openvino_library", str(gguf), *numbers)
    return RunningServer(NAME, command, port, folder / f"{NAME}-{port}.log", within_s=300)
