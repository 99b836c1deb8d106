"""All peers by name: how each is started."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from server.bench.server_process import RunningServer
from tests.bench.peers import llama_server, onnxruntime_genai, openvino_genai, xllamacpp


class Start(Protocol):
    """Starts a server of the model in `gguf` with room for `num_slots` sequences of `context`
    tokens at one time, installing what it needs. Raises BenchError."""

    def __call__(self, folder: Path, gguf: Path, num_slots: int, context: int) -> RunningServer: ...


PEERS: dict[str, Start] = {
    xllamacpp.NAME: xllamacpp.start,
    llama_server.NAME: llama_server.start,
    openvino_genai.NAME: openvino_genai.start,
    onnxruntime_genai.NAME: onnxruntime_genai.start,
}
