"""What runs first in a spawned engine process: takes plain settings, then loads and serves.

Imports the engine only inside the function, so that the server process, which has to import this
module to name the function, never pays for onnxruntime and numba.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.npu.device_config import NpuSettings
from engine.speculation.config import SpeculationConfig
from scheduler.messages import EngineFailed

if TYPE_CHECKING:
    from engine.loader import EngineConfig
    from scheduler.process import Connection

MIN_LOGITS_ROWS = 64
NUM_SPARE_ROWS = 32
"""Rows of logits in a step: one per seat, some for drafts and for prompts that are scored."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything one engine process is told. Plain values; they cross the process boundary."""

    bundle: Path
    device: str
    num_threads: int
    kv_memory_bytes: int
    kv_format: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    aging_s: float
    enable_prefix_caching: bool
    log_level: str
    npu: NpuSettings = NpuSettings()
    speculation: SpeculationConfig = SpeculationConfig()


def prepare_entry(log_level: str) -> None:
    """Before the slow imports: Ctrl-C must not end what has to outlive the server's drain."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=log_level.upper(),
        format="%(asctime)s %(levelname)s engine %(name)s: %(message)s",
    )


def run_engine(connection: Connection, spec: EngineSpec) -> None:
    """Serve `spec.bundle` over `connection` until it is told to end or the server is gone."""
    prepare_entry(spec.log_level)
    try:
        from engine.loader import load_engine
        from scheduler.policy import SchedulerConfig
        from scheduler.process import engine_process_main
    except ImportError as error:
        connection.send(EngineFailed(f"the engine cannot be imported: {error}; reinstall hexlm"))
        return
    config = engine_config(spec)
    scheduling = SchedulerConfig(
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_logits_rows=config.max_logits_rows,
        aging_s=spec.aging_s,
        enable_prefix_caching=spec.enable_prefix_caching,
    )
    engine_process_main(connection, partial(load_engine, config), scheduling)


def engine_config(spec: EngineSpec) -> EngineConfig:
    """What concerns the engine. Imports it."""
    from engine.loader import EngineConfig

    return EngineConfig(
        bundle=spec.bundle,
        device=spec.device,
        num_threads=spec.num_threads,
        kv_memory_bytes=spec.kv_memory_bytes,
        kv_format=spec.kv_format,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_logits_rows=max(MIN_LOGITS_ROWS, spec.max_num_seqs + NUM_SPARE_ROWS),
        npu=spec.npu,
        speculation=spec.speculation,
    )
