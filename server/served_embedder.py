"""One embedding model, or cross-encoder, as the routes see it: names, engine and text side.

The counterpart of `served_model.py`. Knows nothing of how a model is loaded or unloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.architectures.encoder import EncoderConfig
from engine.device_board import DeviceReport
from scheduler.messages import EmbedRequest, EngineInfo, StepStats
from server.encoder_tokenizer import EncoderTokenizer
from server.engine_state import EngineState

Float32Array = NDArray[np.float32]


class EmbeddingEngine(Protocol):
    """What the HTTP side needs of an embedding engine; used from the event loop's thread only."""

    async def embed(self, request: EmbedRequest) -> Float32Array:
        """Vectors [inputs, dimensions] of length 1, or a cross-encoder's logits [inputs, 1];
        cancelling it drops the request.

        Raises EngineUnavailable, QueueFull or GenerationFailed.
        """
        ...

    @property
    def info(self) -> EngineInfo | None:
        """None until the engine was ready for the first time."""
        ...

    @property
    def devices(self) -> DeviceReport | None:
        """See `engine_port.Engine`."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def state_detail(self) -> str: ...

    @property
    def stats(self) -> StepStats: ...


@dataclass(frozen=True)
class ServedEmbedder:
    """`max_model_len` in tokens of one text, special tokens included; `created` in Unix seconds."""

    name: str
    engine: EmbeddingEngine
    tokenizer: EncoderTokenizer
    config: EncoderConfig
    max_model_len: int
    created: int
    quantization: str = "unknown"
    aliases: tuple[str, ...] = ()

    @property
    def is_cross_encoder(self) -> bool:
        """It scores pairs of a query and a document, and gives no embeddings."""
        return self.config.is_cross_encoder

    @property
    def dimensions(self) -> int:
        return self.config.output_size

    @property
    def vocab_size(self) -> int:
        """Ids that a client may name: known to the tokenizer and to the model."""
        return min(self.tokenizer.vocab_size, self.config.vocab_size)

    @property
    def context_limit(self) -> int:
        return self.max_model_len
