"""Measures what the pieces of a step cost here and now: calls on a lane, attention, copies.

Medians of a few runs each. Whatever it runs on must not be in use: it writes to the lane's buffers
and to the pages. Decides nothing and keeps nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from engine.architectures.config import ModelConfig
from engine.attention import Attention
from engine.batch import Batch
from engine.cost_profile import FIRST, HEAD, LAST, MIDDLE, LaneCosts, Points, WholeCosts
from engine.kv_cache import PagedKVCache
from engine.kv_format import BLOCK_SIZE
from engine.lane import Lane
from engine.step_form import StepForm

CHUNK = 64
"""New tokens of the chunk whose attention stands for that of a prefill."""

_COPIED_ROWS = 256
_HANDOVERS = 200
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Pages:
    """What a batch must keep to: sequences of `max_model_len` tokens, pages of `num_blocks`."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Effort:
    """How often each thing is run. Every measurement has a run before it that does not count."""

    num_runs: int
    max_s: float
    """One size of one kind of segment is run again only as long as this allows."""


QUICK = Effort(num_runs=3, max_s=0.3)
THOROUGH = Effort(num_runs=15, max_s=2.0)


def time_lane(
    lane: Lane,
    num_layers: int,
    token_counts: Sequence[int],
    row_counts: Sequence[int],
    is_bucketed: bool,
    call_overhead_s: float | None = None,
    effort: Effort = QUICK,
) -> LaneCosts:
    """Each kind of segment at each number of tokens or rows, ascending. Raises DeviceError.

    `call_overhead_s` None: nobody has measured it; the cheapest call bounds it from above.
    """
    tokens = [(n, *_time_segments(lane, num_layers, n, effort)) for n in token_counts]
    rows = [(n, *_time_rows(lane, n, effort)) for n in row_counts]
    segments: dict[str, Points] = {
        FIRST: tuple((n, first) for n, first, _ in tokens),
        MIDDLE: tuple((n, middle) for n, _, middle in tokens),
        LAST: tuple((n, last) for n, last, _ in rows),
        HEAD: tuple((n, head) for n, _, head in rows),
    }
    if call_overhead_s is None:
        call_overhead_s = min(seconds for points in segments.values() for _, seconds in points)
    return LaneCosts(call_overhead_s, segments, is_bucketed)


def time_cpu_form(
    form: StepForm,
    token_counts: Sequence[int],
    row_counts: Sequence[int],
    pages: Pages,
    effort: Effort = QUICK,
) -> tuple[Points, Points]:
    """(seconds of a step by its tokens, with one row; seconds of more rows than one)."""
    steps, rows = [], []
    for number in token_counts:
        batch = _batch(number, max(number, BLOCK_SIZE), pages)
        steps.append((number, _median_s(partial(form.execute, batch), effort)))
    for number in row_counts:
        batch = replace(
            _batch(number, max(number, BLOCK_SIZE), pages),
            logits_rows=np.arange(number, dtype=np.int32),
        )
        one_row = replace(batch, logits_rows=batch.logits_rows[-1:])
        extra_s = _median_s(partial(form.execute, batch), effort)
        extra_s -= _median_s(partial(form.execute, one_row), effort)
        rows.append((number, max(extra_s, _LEAST_S)))
    return tuple(steps), tuple(rows)


def time_form(
    form: StepForm, steps: Sequence[tuple[int, int]], pages: Pages, effort: Effort = QUICK
) -> WholeCosts:
    """Whole steps of (tokens, context length), ascending; those that do not fit are left out."""
    measured = []
    for num_tokens, context_len in steps:
        batch = _batch(num_tokens, context_len, pages)
        if form.fits(batch):
            seconds = _median_s(partial(form.execute, batch), effort)
            measured.append((num_tokens, context_len, seconds))
    return WholeCosts(tuple(measured))


def time_attention(
    attention: Attention,
    config: ModelConfig,
    cache: PagedKVCache,
    context_lens: Sequence[int],
    max_tokens: int,
    effort: Effort = QUICK,
) -> tuple[Points, Points]:
    """One layer's attention of one token: (of a decode, of a chunk), by context length.

    `max_tokens` is what the attention was made for.
    """
    decode, chunk = [], []
    for context_len in context_lens:
        size = min(CHUNK, context_len, max_tokens)
        one_s = _time_attention(attention, config, cache, 1, context_len, effort)
        chunk_s = _time_attention(attention, config, cache, size, context_len, effort)
        decode.append((context_len, one_s))
        chunk.append((context_len, chunk_s / size))
    return tuple(decode), tuple(chunk)


def time_call(run: Callable[[], object], effort: Effort = QUICK) -> float:
    """Seconds of one call of anything."""
    return _median_s(run, effort)


def time_copy(hidden_size: int, effort: Effort = QUICK) -> float:
    """Bytes a second, from one buffer of residuals to another."""
    source = np.ones((_COPIED_ROWS, hidden_size), np.float32)
    target = np.zeros_like(source)
    return source.nbytes / _median_s(lambda: np.copyto(target, source), effort)


def time_handover() -> float:
    """Seconds from a thread's release of a lock until the thread that waits for it goes on.

    Three of four are faster: what overlapping costs, it costs at every segment.
    """
    ping, pong = threading.Lock(), threading.Lock()
    ping.acquire()
    pong.acquire()

    def answer() -> None:
        for _ in range(_HANDOVERS):
            ping.acquire()
            pong.release()

    other = threading.Thread(target=answer, name="handover")
    other.start()
    times = []
    for _ in range(_HANDOVERS):
        start_s = perf_counter()
        ping.release()
        pong.acquire()
        times.append((perf_counter() - start_s) / 2)
    other.join()
    return sorted(times)[len(times) * 3 // 4]


def context_lens_up_to(longest: int) -> tuple[int, ...]:
    """64, 256, 1024 and 4096 as far as they fit, or else the longest there is."""
    return tuple(n for n in (64, 256, 1024, 4096) if n <= longest) or (max(1, longest),)


def _time_segments(
    lane: Lane, num_layers: int, num_tokens: int, effort: Effort
) -> tuple[float, float]:
    buffers = lane.begin(num_tokens)
    generator = np.random.default_rng(0)
    buffers.hidden[:] = generator.standard_normal(buffers.hidden.shape, np.float32) * 0.1
    buffers.attention[:] = 0
    first_s = _median_s(lambda: lane.run(0), effort)
    if num_layers == 1:
        return first_s, first_s  # there is no middle, and nobody asks for its cost
    return first_s, _median_s(lambda: lane.run(1), effort)


def _time_rows(lane: Lane, num_rows: int, effort: Effort) -> tuple[float, float]:
    buffers = lane.begin_rows(num_rows)
    buffers.hidden[:] = 0.1
    buffers.attention[:] = 0
    last_s = _median_s(lane.run_last, effort)
    return last_s, _median_s(lane.run_head, effort)


def _time_attention(
    attention: Attention, config: ModelConfig, cache: PagedKVCache, num_tokens: int,
    context_len: int, effort: Effort,
) -> float:  # fmt: skip
    batch = _batch(num_tokens, context_len, Pages(cache.num_blocks, context_len))
    attend = attention.begin(batch)
    qkv = np.full((num_tokens, config.qkv_size), 0.1, np.float32)
    out = np.zeros((num_tokens, config.num_heads * config.head_size), np.float32)
    return _median_s(lambda: attend(qkv, cache.layers[0], out), effort)


def _batch(num_tokens: int, context_len: int, pages: Pages) -> Batch:
    """The newest tokens of a sequence of that length, or of several if one cannot have so many.

    They may share blocks: only the time counts.
    """
    context_len = min(context_len, pages.max_model_len)
    sizes = [context_len] * (num_tokens // context_len) if num_tokens > context_len else []
    sizes += [num_tokens - sum(sizes)] if sum(sizes) < num_tokens else []
    starts = [context_len - size for size in sizes]
    positions = np.concatenate([np.arange(start, context_len, dtype=np.int32) for start in starts])
    table = np.arange(-(-context_len // BLOCK_SIZE), dtype=np.int32) % np.int32(pages.num_blocks)
    slots = table[positions // BLOCK_SIZE] * np.int32(BLOCK_SIZE) + positions % BLOCK_SIZE
    return Batch(
        token_ids=np.zeros_like(positions),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_starts=np.cumsum([0, *sizes]).astype(np.int32),
        context_lens=np.full(len(sizes), context_len, np.int32),
        block_tables=np.tile(table, (len(sizes), 1)),
        logits_rows=np.array([num_tokens - 1], np.int32),
    )


def _median_s(call: Callable[[], object], effort: Effort) -> float:
    call()
    times: list[float] = []
    until_s = perf_counter() + effort.max_s
    while len(times) < effort.num_runs and (not times or perf_counter() < until_s):
        start_s = perf_counter()
        call()
        times.append(perf_counter() - start_s)
    return max(median(times), _LEAST_S)
