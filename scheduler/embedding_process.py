"""The process of an embedding engine: load the encoder, tell how it goes, run its loop.

The same life as that of a generation engine, whose parts it uses (`process.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from scheduler.embedding_loop import EmbeddingLoop, TextEncoder
from scheduler.embedding_queue import BatchPolicy, EmbeddingQueue
from scheduler.messages import EngineFailed, EngineInfo, EngineReady
from scheduler.process import (
    Connection,
    PhaseSender,
    ServerGone,
    end_process_after_grace,
    one_line,
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
        encoder = _load(connection, load, policy)
        if encoder is not None:
            EmbeddingLoop(encoder, EmbeddingQueue(policy), inbox, connection.send).run()
    except OSError as exc:
        logger.info("the server is gone, the engine ends: %s", exc)


def _load(connection: Connection, load: EncoderLoader, policy: BatchPolicy) -> TextEncoder | None:
    """None, and the reason sent, if the encoder cannot be loaded. OSError: the server is gone."""
    try:
        loaded = load(PhaseSender(connection))
        info = _info(loaded.facts, policy)
    except ServerGone:
        raise
    except Exception as exc:  # any reason not to start is reported, not only those foreseen
        logger.exception("the encoder could not be loaded")
        connection.send(EngineFailed(one_line(exc)))
        return None
    connection.send(EngineReady(info))
    return loaded.encoder


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
