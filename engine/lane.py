"""A lane: one device's way through the segments, with the buffers that they read and write.

The runner fills in the embeddings, calls the segments in order and computes attention between
them. KV pages live elsewhere, so another lane can take over at any step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.architectures.config import ModelConfig
from engine.batch import Float32Array, Int32Array
from engine.export.model import HEAD_FILE, segment_file
from engine.rows_kernel import copy_rows
from engine.session import CpuSessions


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Views of a lane's own memory for a step of T tokens.

    `hidden` [T, hidden] is to be filled with embeddings. `qkv` [T, (H + 2 * KV) * D] is written by
    each segment but the last, and `attention` [T, H * D] read by each but the first.
    """

    hidden: Float32Array
    qkv: Float32Array
    attention: Float32Array


class Lane(Protocol):
    @property
    def name(self) -> str: ...

    def begin(self, num_tokens: int) -> StepBuffers:
        """Prepares a step of T tokens."""
        ...

    def run(self, index: int) -> None:
        """Segment `index`, 0 to L - 1, over all T tokens. Raises DeviceError."""
        ...

    def head(self, rows: Int32Array) -> Float32Array:
        """Segment L and the head over `rows` [R] of the T tokens: logits [R, V].

        Valid until the next call. Raises DeviceError.
        """
        ...


class CpuLane:
    """ONNX Runtime's CPU provider, any number of tokens up to `max_tokens`."""

    name = "cpu"

    def __init__(
        self, config: ModelConfig, folder: Path, max_tokens: int, max_rows: int, num_threads: int
    ) -> None:
        """Raises BundleError when a graph cannot be loaded."""
        attention_size = config.num_heads * config.head_size
        self._num_layers = config.num_layers
        sessions = CpuSessions(num_threads)
        self._segments = [
            sessions.open(folder / segment_file(i)) for i in range(config.num_layers + 1)
        ]
        self._head = sessions.open(folder / HEAD_FILE)

        def buffer(num_rows: int, size: int) -> Float32Array:
            return np.zeros((1, num_rows, size), np.float32)

        self._hidden = [buffer(max_tokens, config.hidden_size) for _ in range(2)]
        self._qkv = buffer(max_tokens, config.qkv_size)
        self._attention = buffer(max_tokens, attention_size)
        self._row_attention = buffer(max_rows, attention_size)
        self._row_hidden = [buffer(max_rows, config.hidden_size) for _ in range(2)]
        self._logits = buffer(max_rows, config.vocab_size)
        self._num_rows = 0
        self._step = StepBuffers(*(np.zeros((0, 0), np.float32) for _ in range(3)))

    def begin(self, num_tokens: int) -> StepBuffers:
        if num_tokens != len(self._step.hidden):
            self._bind_segments(num_tokens)
            self._step = StepBuffers(
                self._hidden[0][0, :num_tokens],
                self._qkv[0, :num_tokens],
                self._attention[0, :num_tokens],
            )
        return self._step

    def run(self, index: int) -> None:
        self._segments[index].run()

    def head(self, rows: Int32Array) -> Float32Array:
        num_rows = len(rows)
        if num_rows != self._num_rows:
            self._bind_head(num_rows)
        copy_rows(self._attention[0], rows, self._row_attention[0])
        copy_rows(self._hidden[(self._num_layers - 1) % 2][0], rows, self._row_hidden[0][0])
        self._segments[-1].run()
        self._head.run()
        return self._logits[0, :num_rows]

    def _bind_segments(self, num_tokens: int) -> None:
        """Segment i reads one hidden buffer and writes the other."""
        for i, segment in enumerate(self._segments[:-1]):
            segment.bind_input("hidden", self._hidden[(i + 1) % 2 if i else 0][:, :num_tokens])
            if i:
                segment.bind_input("attention", self._attention[:, :num_tokens])
                segment.bind_output("hidden_out", self._hidden[i % 2][:, :num_tokens])
            segment.bind_output("qkv", self._qkv[:, :num_tokens])

    def _bind_head(self, num_rows: int) -> None:
        self._num_rows = num_rows
        last, row_hidden = self._segments[-1], self._row_hidden
        last.bind_input("attention", self._row_attention[:, :num_rows])
        last.bind_input("hidden", row_hidden[0][:, :num_rows])
        last.bind_output("hidden_out", row_hidden[1][:, :num_rows])
        self._head.bind_input("hidden", row_hidden[1][:, :num_rows])
        self._head.bind_output("logits", self._logits[:, :num_rows])
