"""The two servers of a comparison: hexlm as a user starts it, and llama.cpp's own server."""

from __future__ import annotations

from pathlib import Path

from server.bench import server_process
from server.bench.server_process import RunningServer
from server.model_store import ModelStore
from tests.bench.peers import xllamacpp
from tests.bench.peers.environment import NUM_THREADS


def start_hexlm(folder: Path, *options: str) -> RunningServer:
    return server_process.start_hexlm(folder, "--threads", str(NUM_THREADS), *options)


def start_peer(folder: Path, gguf: Path, num_slots: int, context: int = 2048) -> RunningServer:
    """`context`: tokens of each slot."""
    return xllamacpp.start(folder, gguf, num_slots, context)


def downloaded_gguf(model: str) -> Path:
    """The file that the bundle was imported from. Raises FileNotFoundError."""
    folder = ModelStore().downloads_dir / model
    for path in folder.glob("*.gguf"):
        return path
    raise FileNotFoundError(f"no GGUF file in {folder}: run hexlm pull {model}")
