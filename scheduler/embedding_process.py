"""The process of an embedding engine: load the encoder, tell how it goes, run its loop.

The same life as that of a generation engine, whose parts it uses (`process.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from scheduler.embedding_loop import EmbeddingLoop, TextEncoder
from scheduler.embedding_queue import BatchPolicy, EmbeddingQueue
from scheduler.messages import EngineInfo
from scheduler.process import (
    Connection,
    end_process_after_grace,
    load_and_report,
    prepare_process,
    start_receiver,
)

logger = logging.getLogger(__name__)


class EncoderFactsLike(Protocol):
    """What a loaded encoder says of itself. The meanings are those of `EngineInfo`."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def device_reason(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def weight_format(self) -> str: ...


class LoadedEncoderLike(Protocol):
    @property
    def encoder(self) -> TextEncoder: ...
    @property
    def facts(self) -> EncoderFactsLike: ...


EncoderLoader = Callable[[Callable[[str], None]], LoadedEncoderLike]


def embedding_process_main(
    connection: Connection, load: EncoderLoader, policy: BatchPolicy
) -> None:
    """The whole life of an embedding engine's process."""
    prepare_process()
    run_embedding_engine(connection, load, policy, on_closed=end_process_after_grace)


def run_embedding_engine(
    connection: Connection,
    load: EncoderLoader,
    policy: BatchPolicy,
    on_closed: Callable[[], None] = lambda: None,
) -> None:
    """The same without what concerns the process as a whole, so it can run in a thread."""
    inbox = start_receiver(connection, on_closed)
    try:
        encoder = load_and_report(connection, partial(_load, load, policy))
        if encoder is not None:
            EmbeddingLoop(encoder, EmbeddingQueue(policy), inbox, connection.send).run()
    except OSError as exc:
        logger.info("the server is gone, the engine ends: %s", exc)


def _load(
    load: EncoderLoader, policy: BatchPolicy, on_phase: Callable[[str], None]
) -> tuple[TextEncoder, EngineInfo]:
    loaded = load(on_phase)
    return loaded.encoder, _info(loaded.facts, policy)


def _info(facts: EncoderFactsLike, policy: BatchPolicy) -> EngineInfo:
    return EngineInfo(
        max_model_len=facts.max_model_len,
        num_blocks=0,
        block_size=0,
        kv_format="none",
        vocab_size=facts.vocab_size,
        device=facts.device,
        device_reason=facts.device_reason,
        num_threads=facts.num_threads,
        batch_invariant=False,
        weight_format=facts.weight_format,
        kv_bytes=0,
        max_num_seqs=policy.max_batch,
    )
