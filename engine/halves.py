"""A batch cut in two, so that one half's attention can run beside the other half's segments.

Pure decisions: whether it pays, where to cut, and the two batches. Knows neither lanes nor threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.batch import Batch, Int32Array
from engine.placement import ROW_BUCKETS

MIN_GAIN = 0.1
"""Estimates are not better than this: below it, a step in one piece is as good and simpler."""

HANDOVERS = 4
"""From thread to thread in each round: every half gets the device and gets the CPU."""

MIN_CHUNK = 32
"""A sequence with fewer new tokens is not cut itself."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens 0:`token` are the first half. Estimated seconds of the step in two and in one."""

    token: int
    overlapped_s: float
    serial_s: float


def find_cut(
    batch: Batch,
    attention_s: np.ndarray,
    device_s: Callable[[int], float],
    handover_s: float,
    num_layers: int,
) -> Cut | None:
    """The cut with the least estimated time; None if the step had better stay in one piece.

    `attention_s` [S]: one layer's attention of each sequence. `device_s(T)`: one segment's time.
    """
    num_tokens = batch.num_tokens
    whole_s, all_attention_s = device_s(num_tokens), float(attention_s.sum())
    serial_s = num_layers * (whole_s + all_attention_s)
    if min(whole_s, all_attention_s) * num_layers <= serial_s * MIN_GAIN:
        return None  # all that can be saved is the smaller side
    attention_up_to = np.concatenate([[0.0], np.cumsum(attention_s)])
    best = None
    for token in _places(batch, attention_up_to):
        first_s = float(np.interp(token, batch.query_starts, attention_up_to))
        overlapped_s = overlapped_seconds(
            (device_s(token), device_s(num_tokens - token)),
            (first_s, all_attention_s - first_s),
            handover_s,
            num_layers,
        )
        if best is None or overlapped_s < best.overlapped_s:
            best = Cut(token, overlapped_s, serial_s)
    if best is None or best.overlapped_s >= serial_s * (1 - MIN_GAIN):
        return None
    return best


def overlapped_seconds(
    device_s: tuple[float, float],
    attention_s: tuple[float, float],
    handover_s: float,
    num_layers: int,
) -> float:
    """Time of `num_layers` rounds in which the two halves take turns on device and CPU.

    A round takes as long as the busier of the two, but no half can be faster than its own device
    and attention one after the other. Before the first round, or after the last one, the busier of
    the two waits for the other.
    """
    device, attention = sum(device_s), sum(attention_s)
    chains = [d + a for d, a in zip(device_s, attention_s, strict=True)]
    round_s = max(device, attention, *chains) + HANDOVERS * handover_s
    alone_s = attention_s[1] if device >= attention else device_s[0]
    return num_layers * round_s + alone_s


def _places(batch: Batch, attention_up_to: np.ndarray) -> list[int]:
    """Where a cut may pay: at half the attention, and where a half has the size of a bucket.

    Between sequences, or within a long chunk.
    """
    total, starts = batch.num_tokens, batch.query_starts
    middle = int(np.searchsorted(attention_up_to, attention_up_to[-1] / 2))
    wanted = {int(token) for token in starts[max(0, middle - 1) : middle + 2]}
    sizes = [size for size in ROW_BUCKETS if total <= 8 * size < 8 * total]
    wanted |= {total // 2, *sizes, *(total - size for size in sizes)}
    boundaries = set(starts.tolist())
    return sorted(
        token
        for token in wanted
        if 0 < token < total and (token in boundaries or _is_in_chunk(batch, token))
    )


def _is_in_chunk(batch: Batch, token: int) -> bool:
    s = int(np.searchsorted(batch.query_starts, token, side="right")) - 1
    start, end = batch.query_starts[s], batch.query_starts[s + 1]
    return bool(end - start >= MIN_CHUNK and start < token)


def cut_batch(batch: Batch, token: int) -> tuple[Batch, Batch]:
    """Tokens 0:token and token:T, each a batch of its own. `logits_rows` must be ascending.

    A sequence that is cut is in both; its second part attends to what the first one writes, so
    each layer's attention of the first half must come before that of the second.
    """
    starts, lens = batch.query_starts, batch.context_lens
    s = int(np.searchsorted(starts, token, side="right")) - 1
    is_cut = int(starts[s]) < token
    row = int(np.searchsorted(batch.logits_rows, token))
    first_lens: Int32Array = lens[: s + is_cut].copy()
    if is_cut:
        first_lens[-1] -= starts[s + 1] - token
    first = Batch(
        token_ids=batch.token_ids[:token],
        positions=batch.positions[:token],
        slot_mapping=batch.slot_mapping[:token],
        query_starts=np.minimum(starts[: s + is_cut + 1], np.int32(token)),
        context_lens=first_lens,
        block_tables=batch.block_tables[: s + is_cut],
        logits_rows=batch.logits_rows[:row],
    )
    second = Batch(
        token_ids=batch.token_ids[token:],
        positions=batch.positions[token:],
        slot_mapping=batch.slot_mapping[token:],
        query_starts=np.maximum(starts[s:] - np.int32(token), np.int32(0)),
        context_lens=lens[s:],
        block_tables=batch.block_tables[s:],
        logits_rows=batch.logits_rows[row:] - np.int32(token),
    )
    return first, second
