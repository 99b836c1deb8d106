"""Whole steps on the NPU: graphs of several layers with their attention inside.

For devices on which a call costs so much that one for each segment is too many. A step is cut into
pieces; each piece goes through all graphs, with a window of its sequences' earlier keys and values
that the host gathers from the pages, and its new ones go to the pages before the next piece begins:
a step of many pieces is a chunked prefill. Pages are as every other form leaves them, so forms can
follow each other at any step. Never falls back. Knows no provider and makes no decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.architectures.config import ModelConfig
from engine.attention import rope_table
from engine.batch import Batch, Float32Array
from engine.buckets import BucketPlan, Piece, default_costs
from engine.embedding import Embedding
from engine.export.fused_graph import (
    input_shapes,
    mask_name,
    new_rows_name,
    new_rows_size,
    rope_names,
    window_names,
)
from engine.kv_cache import PagedKVCache
from engine.lane import LaneCounters
from engine.npu.calls import CallAccount, HostMemory, PlainMemory
from engine.npu.fp16_range import rows_not_finite, settle
from engine.npu.fused_window import PieceLayout
from engine.npu.lane import HeadRows
from engine.page_rows import PageRows
from engine.recorder import Recorder
from engine.session import Session
from engine.span import Category, lane_track

Bucket = tuple[int, int]
"""(tokens T, earlier tokens W)."""


@dataclass(frozen=True, slots=True)
class FusedGraphs:
    """Loaded graphs: for each run of layers, a session for every bucket; and the heads.

    Every run has the same buckets, all pairs of some T and some W.
    """

    parts: tuple[tuple[range, Mapping[Bucket, Session]], ...]
    heads: Mapping[int, Session]

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return tuple(sorted({tokens for tokens, _ in self.parts[0][1]}))

    @property
    def window_buckets(self) -> tuple[int, ...]:
        return tuple(sorted({window for _, window in self.parts[0][1]}))


class FusedLane:
    """See `step_form.StepForm`. Not thread-safe. `max_rows` bounds R."""

    def __init__(
        self,
        config: ModelConfig,
        graphs: FusedGraphs,
        name: str,
        embedding: Embedding,
        cache: PagedKVCache,
        max_model_len: int,
        max_rows: int,
        memory: HostMemory | None = None,
    ) -> None:
        """Raises DeviceError when shared memory cannot be had or used."""
        memory = memory or PlainMemory()
        self.name = name
        self._embedding = embedding
        self._cache = cache
        self._plan = BucketPlan(default_costs(graphs.token_buckets))
        self._windows = graphs.window_buckets
        self._pages = PageRows(config, cache.kv_format, max_model_len)
        self._account = CallAccount(memory.is_shared, lane_track(name))
        self._buffers = _Buffers(config, graphs, max_model_len, memory)
        self._parts = [
            _Part(layers, sessions, self._buffers, memory, turn % 2, self._account)
            for turn, (layers, sessions) in enumerate(graphs.parts)
        ]
        self._head = HeadRows(config, graphs.heads, max_rows, memory, self._account)

    @property
    def counters(self) -> LaneCounters:
        return self._account.counters

    def fits(self, batch: Batch) -> bool:
        """Whether the earlier tokens of every piece find room in a window."""
        pieces = self._plan.pieces(batch.num_tokens)
        needed = (PieceLayout.of(batch, piece).num_columns for piece in pieces)
        return all(columns <= self._windows[-1] for columns in needed)

    def execute(self, batch: Batch) -> Float32Array:
        rows = batch.logits_rows
        for piece in self._plan.pieces(batch.num_tokens):
            hidden = self._run_piece(batch, piece)
            end = piece.start + piece.num_rows
            here = np.flatnonzero((rows >= piece.start) & (rows < end))
            self._head.final[0, here] = hidden[rows[here] - piece.start]
        if len(rows) == 0:
            return np.empty((0, 0), np.float32)
        return self._head.run(len(rows))

    def record(self, recorder: Recorder) -> None:
        self._account.recorder = recorder

    def interrupt(self) -> None:
        """It goes on: a call into a device cannot be stopped."""

    def close(self) -> None:
        self._parts = []
        del self._head

    def _run_piece(self, batch: Batch, piece: Piece) -> Float32Array:
        """The final hidden state of the piece's rows, [T', hidden]."""
        layout = PieceLayout.of(batch, piece)
        window = next(size for size in self._windows if size >= layout.num_columns)
        bucket = piece.bucket, window
        rows = slice(piece.start, piece.start + piece.num_rows)
        hidden = self._buffers.begin(layout, bucket)
        self._embedding.lookup(batch.token_ids[rows], hidden)
        lost = np.zeros(piece.num_rows, np.bool_)
        lost[rows_not_finite([hidden], "the first layer")] = True
        for part in self._parts:
            lost = layout.lost_rows(self._gather(part, layout, window), lost)
            part.run(piece, window, lost)
            self._write(part, layout)
        result = self._buffers.hidden[len(self._parts) % 2][0, : piece.num_rows]
        result[lost] = np.nan
        return result

    def _gather(self, part: _Part, layout: PieceLayout, window: int) -> np.ndarray:
        """The earlier tokens of a part's layers; which sequences have one that is not finite."""
        recorder, track = self._account.recorder, self._account.track
        start_ns = recorder.now_ns()
        lost = np.zeros(len(layout.num_past), np.bool_)
        for layer in part.layers:
            keys, values = self._buffers.window(layer - part.layers.start, window)
            pages = self._cache.layers[layer]
            lost |= self._pages.gather(layout.tables, layout.num_past, pages, keys, values)
            self._account.gathered(
                layout.num_columns * (keys[:, :, 0].nbytes + values[:, 0].nbytes)
            )
        recorder.ended("gather pages", Category.ATTENTION, track, start_ns)
        return lost

    def _write(self, part: _Part, layout: PieceLayout) -> None:
        recorder, track = self._account.recorder, self._account.track
        start_ns = recorder.now_ns()
        for layer in part.layers:
            rows = self._buffers.new_rows[layer - part.layers.start][0, : len(layout.slots)]
            pages = self._cache.layers[layer]
            self._pages.write(rows, layout.positions, layout.slots, pages)
        recorder.ended("write pages", Category.ATTENTION, track, start_ns)


class _Buffers:
    """What all parts read and write in turn; the smaller buckets use the front of it."""

    def __init__(
        self, config: ModelConfig, graphs: FusedGraphs, max_model_len: int, memory: HostMemory
    ) -> None:
        self._config = config
        tokens, window = graphs.token_buckets[-1], graphs.window_buckets[-1]
        most = max(len(layers) for layers, _ in graphs.parts)
        size = config.num_kv_heads * config.head_size
        self.hidden = [memory.allocate(tokens, config.hidden_size) for _ in range(2)]
        self.new_rows = [memory.allocate(tokens, new_rows_size(config)) for _ in range(most)]
        self._keys = [memory.allocate(window, size) for _ in range(most)]
        self._values = [memory.allocate(window, size) for _ in range(most)]
        self._masks = {
            layer.window: memory.allocate(tokens, window + tokens) for layer in config.layers
        }
        self._tables = [rope_table(rope, max_model_len) for rope in config.ropes]
        self._ropes = [
            [memory.allocate(tokens, table.shape[1]) for table in tables if table.size]
            for tables in self._tables
        ]

    def begin(self, layout: PieceLayout, bucket: Bucket) -> Float32Array:
        """Writes what is the same for all layers; returns the hidden rows [T', hidden] to fill."""
        tokens, num_rows = bucket[0], len(layout.positions)
        for window in self._masks:
            layout.write_mask(window, self._mask(window, bucket)[0])
        for tables, buffers in zip(self._tables, self._ropes, strict=True):
            for table, buffer in zip(tables, buffers, strict=False):
                buffer[0, :num_rows] = table[layout.positions]
                buffer[0, num_rows:tokens] = 0
        self.hidden[0][0, num_rows:tokens] = 0
        return self.hidden[0][0, :num_rows]

    def _mask(self, window: int, bucket: Bucket) -> Float32Array:
        tokens, columns = bucket
        return _front(self._masks[window], (1, tokens, columns + tokens))

    def window(self, place: int, window: int) -> tuple[Float32Array, Float32Array]:
        """Keys [KV, D, W] and values [KV, W, D] of the layer at this place of its part."""
        c = self._config
        keys = _front(self._keys[place], (c.num_kv_heads, c.head_size, window))
        return keys, _front(self._values[place], (c.num_kv_heads, window, c.head_size))

    def inputs(self, layers: range, bucket: Bucket) -> dict[str, Float32Array]:
        """All inputs of a part's graph but `hidden`, by name."""
        tokens, window = bucket
        arrays = {}
        for index in layers:
            layer = self._config.layers[index]
            arrays[mask_name(layer.window)] = self._mask(layer.window, bucket)
            names = rope_names(layer.rope)
            for name, buffer in zip(names, self._ropes[layer.rope], strict=False):
                arrays[name] = buffer[:, :tokens]
            windows = self.window(index - layers.start, window)
            arrays |= zip(window_names(index), windows, strict=True)
        assert arrays.keys() == input_shapes(self._config, layers, tokens, window).keys()
        return arrays


class _Part:
    """One run of layers, in all its buckets."""

    def __init__(
        self,
        layers: range,
        sessions: Mapping[Bucket, Session],
        buffers: _Buffers,
        memory: HostMemory,
        source: int,
        account: CallAccount,
    ) -> None:
        """`source`: which of the two hidden buffers it reads; it writes the other."""
        self.layers = layers
        self._sessions = sessions
        self._buffers = buffers
        self._memory = memory
        self._read, self._written = buffers.hidden[source], buffers.hidden[1 - source]
        self._account = account
        self._name = f"layers {layers.start} to {layers.stop - 1}"
        self._bound: dict[Bucket, tuple[Session, int]] = {}
        if memory.is_shared:  # see BoundGraph.register
            self._binding(max(sessions))[0].run()

    def run(self, piece: Piece, window: int, lost: np.ndarray) -> None:
        """Raises DeviceError. Rows that are `lost` are zeros within, and their new rows are NaN."""
        num_rows, indices = piece.num_rows, np.flatnonzero(lost)
        read, written = self._read[0, :num_rows], self._written[0, :num_rows]
        read[indices] = 0
        bound, num_bytes = self._binding((piece.bucket, window))
        self._account.call(bound, piece, num_bytes)
        new_rows = [rows[0, :num_rows] for rows in self._buffers.new_rows[: len(self.layers)]]
        settle([written, *new_rows], indices, self._name)

    def _binding(self, bucket: Bucket) -> tuple[Session, int]:
        """The session bound to the buffers, and the bytes that a call moves."""
        if bucket not in self._bound:
            tokens = bucket[0]
            inputs = {"hidden": self._read[:, :tokens]}
            inputs |= self._buffers.inputs(self.layers, bucket)
            outputs = {"hidden_out": self._written[:, :tokens]}
            for place, layer in enumerate(self.layers):
                outputs[new_rows_name(layer)] = self._buffers.new_rows[place][:, :tokens]
            bound = self._memory.binding(self._sessions[bucket])
            for name, array in inputs.items():
                bound.bind_input(name, array)
            for name, array in outputs.items():
                bound.bind_output(name, array)
            num_bytes = sum(array.nbytes for array in (*inputs.values(), *outputs.values()))
            self._bound[bucket] = bound, num_bytes
        return self._bound[bucket]


def _front(buffer: Float32Array, shape: tuple[int, ...]) -> Float32Array:
    """The first elements of a buffer in another shape."""
    return buffer.reshape(-1)[: int(np.prod(shape))].reshape(shape)
