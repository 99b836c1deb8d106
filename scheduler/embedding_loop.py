"""The loop of an embedding engine: requests in, batches through the encoder, vectors out.

Failure. A batch that raises has changed nothing, so each of its texts is tried alone; a request
one of whose texts fails again ends with an error, and the others never notice.

The loop thread owns the queue and the encoder. Knows no pipe and no process, as `StepLoop`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol

from engine.batch import Float32Array
from scheduler.embedding_queue import EmbeddingQueue, QueuedText
from scheduler.messages import (
    Abort,
    EmbedRequest,
    EmbedResult,
    EmbedStep,
    Shutdown,
    StepStats,
    ToEngine,
)

logger = logging.getLogger(__name__)

EMBED_ERROR = "the model failed repeatedly while computing this request"


class TextEncoder(Protocol):
    def encode(self, sequences: Sequence[Sequence[int]]) -> Float32Array:
        """Vectors [B, dimensions] of B texts. May raise anything; it can be called again then."""
        ...


class EmbeddingLoop:
    """`send` takes one message per batch. If it raises OSError, the other side is gone."""

    def __init__(
        self,
        encoder: TextEncoder,
        queue: EmbeddingQueue,
        inbox: SimpleQueue[ToEngine],
        send: Callable[[EmbedStep], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoder = encoder
        self._queue = queue
        self._inbox = inbox
        self._send = send
        self._clock = clock
        self._stats = StepStats()

    def run(self) -> None:
        """Runs until a `Shutdown` arrives or the receiver of results is gone."""
        while self._take_messages():
            if self._queue.wait_s(self._clock()) != 0.0:
                continue
            try:
                self._send(self._step())
            except OSError as exc:
                logger.info("the server is gone, the engine ends: %s", exc)
                return

    def _take_messages(self) -> bool:
        """All that has arrived; waits as long as no batch is due. False: end."""
        wait_s = self._queue.wait_s(self._clock())
        try:
            message = self._inbox.get(block=wait_s != 0.0, timeout=wait_s)
            while self._take(message):
                message = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _take(self, message: ToEngine) -> bool:
        match message:
            case EmbedRequest():
                self._queue.add(message, self._clock())
            case Abort():
                self._queue.abort(message.request_id)
            case Shutdown():
                return False
        return True

    def _step(self) -> EmbedStep:
        start_s = self._clock()
        texts = self._queue.take_batch()
        vectors = self._encode(texts)
        results = self._results(texts, vectors)
        num_tokens = sum(len(text.token_ids) for text in texts)
        self._stats = replace(
            self._stats,
            num_waiting=self._queue.num_texts,
            num_step_tokens=num_tokens,
            total_steps=self._stats.total_steps + 1,
            total_prompt_tokens=self._stats.total_prompt_tokens + num_tokens,
            execute_s=self._clock() - start_s,
            queue_times_s=tuple(start_s - text.arrival_s for text in texts),
        )
        return EmbedStep(results, self._stats)

    def _encode(self, texts: list[QueuedText]) -> list[Float32Array | None]:
        """A vector per text; None for those that the encoder could not compute."""
        try:
            return list(self._encoder.encode([text.token_ids for text in texts]))
        except Exception:  # whatever the device raises must not end the loop
            logger.exception("a batch of %d texts failed; each is tried alone", len(texts))
            failed = self._stats.total_failed_steps + 1
            self._stats = replace(self._stats, total_failed_steps=failed)
        return [self._encode_alone(text) for text in texts]

    def _encode_alone(self, text: QueuedText) -> Float32Array | None:
        try:
            vector: Float32Array = self._encoder.encode([text.token_ids])[0]
        except Exception:  # this text is at fault: it alone gets the error
            logger.exception("input %d of %s failed again", text.index, text.request_id)
            return None
        return vector

    def _results(
        self, texts: list[QueuedText], vectors: list[Float32Array | None]
    ) -> tuple[EmbedResult, ...]:
        """One result per request of the batch, in the order of its first text."""
        by_request: dict[str, list[tuple[int, Float32Array | None]]] = {}
        for text, vector in zip(texts, vectors, strict=True):
            by_request.setdefault(text.request_id, []).append((text.index, vector))
        return tuple(self._result(key, parts) for key, parts in by_request.items())

    def _result(self, request_id: str, parts: list[tuple[int, Float32Array | None]]) -> EmbedResult:
        computed = [(index, vector) for index, vector in parts if vector is not None]
        if len(computed) < len(parts):
            self._queue.abort(request_id)
            return EmbedResult(request_id, error=EMBED_ERROR)
        vectors = b"".join(vector.astype("<f4").tobytes() for _, vector in computed)
        return EmbedResult(request_id, tuple(index for index, _ in computed), vectors)
