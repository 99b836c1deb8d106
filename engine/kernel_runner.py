"""The CPU's own way through a step: one compiled function on a team of threads, no graphs.

A `StepForm`. Faster than a lane of sessions, since no operator has to wake threads or copy
weights, and exact for block formats that have no graph operator (`panel_matrix.py`).
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.architectures.config import ModelConfig
from engine.batch import Batch, Float32Array
from engine.embedding import Embedding
from engine.errors import StepInterrupted
from engine.kernels.attention_kernel import make_buffers
from engine.kernels.attention_tiles import open_tiles
from engine.kernels.panel_amx import UNPACKED_BYTES, WIDE_ROWS
from engine.kernels.panel_matrix import BLOCK_INPUTS, PANEL_OUTPUTS
from engine.kernels.panel_product import CHUNK_PANELS, GATED_COLUMNS, GELU_TANH, SILU, Rows
from engine.kernels.panel_tiles import HAS_MATRIX_UNIT, STREAMS, TILE_ROWS
from engine.kernels.step_kernel import (
    NUM_LAYER_PHASES,
    Buffers,
    Model,
    Numbers,
    Pages,
    Step,
    phase_names,
    run_step,
    sync_words,
)
from engine.kv_cache import PagedKVCache
from engine.kv_format import KVFormat
from engine.lane import LaneCounters
from engine.panel_streams import PanelStreams
from engine.panel_weights import PanelWeights
from engine.recorder import NO_RECORDER, Recorder
from engine.team_size import TeamSize


class KernelRunner:
    """`max_tokens` bounds T, `max_rows` R. Not thread-safe: one per loop thread."""

    name = "cpu"

    def __init__(
        self,
        config: ModelConfig,
        weights: PanelWeights,
        embedding: Embedding,
        cache: PagedKVCache,
        max_tokens: int,
        max_rows: int,
        num_threads: int,
        max_model_len: int,
    ) -> None:
        self._weights = weights
        self._embedding = embedding
        self._vocab_size = config.vocab_size
        self._num_layers = config.num_layers
        self._team = TeamSize(num_threads)
        self._streams = PanelStreams(STREAMS)
        tiles = weights.model.tiles
        self._models = {
            streams: weights.model._replace(tiles=tiles._replace(streams=streams))
            for streams in STREAMS
        }
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "step")
        self._numbers = make_numbers(config, weights, cache.kv_format)
        self._buffers = make_step_buffers(
            config, cache.kv_format, max_tokens, max_rows, num_threads, max_model_len
        )
        self._pages = Pages(*cache.arrays)
        self._recorder: Recorder = NO_RECORDER
        self._phases = labelled_phases(config.num_layers)
        self._num_steps = self._num_tokens = 0
        self._tiles = open_tiles(cache.kv_format, config.num_heads // config.num_kv_heads)

    @property
    def counters(self) -> LaneCounters:
        return LaneCounters(num_calls=self._num_steps, num_rows=self._num_tokens)

    def fits(self, batch: Batch) -> bool:
        return True

    def record(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def interrupt(self) -> None:
        """See `StepForm.interrupt`."""
        self._buffers.stop[0] = 1

    def close(self) -> None:
        self._helpers.shutdown()

    def execute(self, batch: Batch) -> Float32Array:
        """Logits [R, V] float32 of `batch.logits_rows`, valid until the next call.

        Writes keys and values of all tokens to their slots. Raises StepInterrupted.
        """
        self._num_steps += 1
        self._num_tokens += batch.num_tokens
        self._embedding.lookup(batch.token_ids, self._buffers.hidden[: batch.num_tokens])
        self._buffers.sync[:] = 0
        size = self._team.choose(batch.num_tokens)
        streams = self._streams.choose(batch.num_tokens)
        started = time.perf_counter()
        try:
            num_threads = self._run(size, self._models[streams], self._step(batch))
        finally:
            self._buffers.stop[0] = 0
        seconds = time.perf_counter() - started
        self._recorder.ran(self._phases, self._buffers.times, num_threads, started)
        wait = self._wait_share(num_threads) if num_threads > 1 else 0.0
        self._team.record(batch.num_tokens, size, seconds / batch.num_tokens, wait)
        self._streams.record(batch.num_tokens, streams, seconds)
        return self._logits(len(batch.logits_rows))

    def _run(self, num_threads: int, model: Model, step: Step) -> int:
        """How many of the threads came in time to take part."""

        def work(part: int) -> bool:
            return bool(
                run_step(
                    part, num_threads, model, self._numbers, step, self._pages, self._buffers
                )
            )  # fmt: skip

        others = [self._helpers.submit(work, part) for part in range(1, num_threads)]
        is_complete = work(0)
        while others and others[-1].cancel():  # it has not begun
            others.pop()
        for other in others:
            other.result()
        if not is_complete:
            raise StepInterrupted("something more urgent has come")
        return 1 + len(others)

    def _wait_share(self, num_threads: int) -> float:
        """Of the last step's time, averaged over its threads."""
        waited, total = self._buffers.waits[:num_threads].sum(axis=0).tolist()
        return float(waited / total)

    def _step(self, batch: Batch) -> Step:
        return Step(
            batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens,
            batch.block_tables, batch.logits_rows, self._tiles,
        )  # fmt: skip

    def _logits(self, num_rows: int) -> Float32Array:
        logits: Float32Array = self._buffers.logits[:num_rows, : self._vocab_size]
        return np.ascontiguousarray(logits)


def labelled_phases(num_layers: int) -> tuple[tuple[str, int | None], ...]:
    """The phases of a step with their layers; those of the head have none."""
    names = phase_names(num_layers)
    layers = [i // NUM_LAYER_PHASES for i in range(NUM_LAYER_PHASES * num_layers)]
    return tuple(zip(names, [*layers, *[None] * (len(names) - len(layers))], strict=True))


def make_numbers(config: ModelConfig, weights: PanelWeights, kv_format: KVFormat) -> Numbers:
    q_size, kv_size = (n * config.head_size for n in (config.num_heads, config.num_kv_heads))
    is_full = config.query_key_norm == "full"
    return Numbers(
        activation=GELU_TANH if config.activation == "gelu_tanh" else SILU,
        head_size=config.head_size,
        q_size=q_size,
        qk_size=q_size + kv_size,
        q_norm_size=q_size if is_full else config.head_size,
        k_norm_size=kv_size if is_full else config.head_size,
        final_norm=weights.final_norm,
        head=weights.head,
        key_level=kv_format.keys.max_level,
        value_level=kv_format.values.max_level,
        epsilon=np.float32(config.rms_norm_eps),
        residual_scale=np.float32(config.residual_scale),
        logits_scale=np.float32(config.logits_scale),
        logits_softcap=np.float32(config.logits_softcap),
        attention_scale=np.float32(config.attention_scale),
        attention_softcap=np.float32(config.attention_softcap),
    )


def make_step_buffers(
    config: ModelConfig,
    kv_format: KVFormat,
    max_tokens: int,
    max_rows: int,
    num_threads: int,
    max_model_len: int,
) -> Buffers:
    hidden, attended = config.hidden_size, config.num_heads * config.head_size
    widest = max(2 * hidden, attended, config.intermediate_size)  # gates and ups at once
    unpacked = CHUNK_PANELS * widest // BLOCK_INPUTS * UNPACKED_BYTES if HAS_MATRIX_UNIT else 0
    vocab = config.vocab_size + -config.vocab_size % PANEL_OUTPUTS
    queries, attention = make_buffers(config, kv_format, max_tokens, num_threads, max_model_len)

    def floats(num_rows: int, size: int) -> Float32Array:
        return np.zeros((num_rows + TILE_ROWS, size), np.float32)

    def rows(size: int) -> Rows:
        num_blocks = size // BLOCK_INPUTS
        spare = max_tokens + WIDE_ROWS
        levels = np.zeros((spare, size), np.int8)
        scales, sums = (np.zeros((spare, num_blocks), np.float32) for _ in range(2))
        return Rows(levels, scales, sums)

    return Buffers(
        sync=np.zeros(sync_words(config.num_layers, num_threads), np.int64),
        stop=np.zeros(1, np.int64),
        hidden=floats(max_tokens, hidden),
        row_hidden=floats(max_rows, hidden),
        qkv=floats(max_tokens, config.qkv_size),
        attended=floats(max_tokens, attended),
        branch=floats(max_tokens, hidden),
        entering=rows(hidden),
        inner=rows(max(attended, config.intermediate_size)),
        logits=floats(max_rows, vocab),
        tiles=np.zeros((num_threads, WIDE_ROWS, GATED_COLUMNS), np.float32),
        unpacked=np.zeros((num_threads, unpacked), np.uint8),
        rows=np.zeros((num_threads, hidden), np.float32),
        queries=queries,
        attention=attention,
        waits=np.zeros((num_threads, 2), np.int64),
        times=np.zeros((num_threads, 2 * len(phase_names(config.num_layers)) + 1), np.int64),
    )
