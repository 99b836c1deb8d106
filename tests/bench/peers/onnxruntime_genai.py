"""onnxruntime-genai behind `completions_http`, with a model that its own builder makes.

The weights of the GGUF file are dequantized with transformers and then quantized by the builder:
4 bits in blocks of 32, symmetric, with the head; int8 activations. About as many bytes as Q4_1, but
not the same weights.
"""

from __future__ import annotations

from pathlib import Path

from server.bench.server_process import RunningServer, free_port
from tests.bench.peers.environment import (
    NUM_THREADS,
    cached_folder,
    module_command,
    python_with,
    run,
)

NAME = "onnxruntime-genai"
PACKAGES = (
    "onnxruntime-genai==0.18.0",
    "onnx-ir",
    "onnx",
    "torch==2.13.0",
    "transformers>=5",
    "accelerate",
    "gguf>=0.17",
)


def start(folder: Path, gguf: Path, num_slots: int, context: int) -> RunningServer:
    port = free_port()
    python = python_with(NAME, PACKAGES)
    model = _model(python, gguf)
    numbers = [str(each) for each in (port, NUM_THREADS, num_slots, context)]
    command = module_command(python, "tests.bench.peers.genai_library", str(model), *numbers)
    return RunningServer(NAME, command, port, folder / f"{NAME}-{port}.log", within_s=300)


def _model(python: Path, gguf: Path) -> Path:
    """The folder of the converted model, made if it is not there yet. Raises BenchError."""
    folder = cached_folder(f"{NAME}-models") / f"{gguf.stem}-{gguf.stat().st_size}"
    if not (folder / "done").is_file():
        arguments = (str(gguf), str(folder))
        command = module_command(python, "tests.bench.peers.genai_model", *arguments)
        run(f"the model of {NAME}", command)
        (folder / "done").touch()
    return folder
