"""What runs first in an embedding engine's process: takes plain settings, then loads and serves.

The counterpart of `engine_entry.py`, and as light to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.messages import EngineFailed
from server.engine_entry import prepare_entry

if TYPE_CHECKING:
    from scheduler.process import Connection


@dataclass(frozen=True, slots=True)
class EmbeddingEngineSpec:
    """Everything one embedding engine is told; the last four are those of `BatchPolicy`."""

    bundle: Path
    device: str
    num_threads: int
    max_model_len: int | None
    log_level: str
    window_s: float
    max_batch: int
    max_length_difference: int
    max_batch_tokens: int


def run_embedding_engine(connection: Connection, spec: EmbeddingEngineSpec) -> None:
    """Serve `spec.bundle` over `connection` until it is told to end or the server is gone."""
    prepare_entry(spec.log_level)
    try:
        from engine.encoder import EncoderSettings, load_encoder
        from scheduler.embedding_process import embedding_process_main
        from scheduler.embedding_queue import BatchPolicy
    except ImportError as error:
        connection.send(EngineFailed(f"the engine cannot be imported: {error}; reinstall hexlm"))
        return
    settings = EncoderSettings(spec.bundle, spec.device, spec.num_threads, spec.max_model_len)
    policy = BatchPolicy(
        window_s=spec.window_s,
        max_batch=spec.max_batch,
        max_length_difference=spec.max_length_difference,
        max_batch_tokens=spec.max_batch_tokens,
    )
    embedding_process_main(connection, partial(load_encoder, settings), policy)
