"""Whether this machine's matrix kernels give a token the same bits in every batch.

The numerics contract rests on it (docs/architecture.md). Measured on x86 with AVX-512 VNNI; on
other machines this small check at start tells, and `/health` shows what it found.
"""

from __future__ import annotations

import numpy as np

from engine.batch import Batch
from engine.kv_format import BLOCK_SIZE
from engine.lane import Lane, head
from engine.step_form import StepForm

_SIZES = (1, 2, 3, 5, 8, 16, 33)


def is_batch_invariant(lane: Lane) -> bool:
    """Runs the first segment and the head on the same tokens in batches of several sizes."""
    largest = max(_SIZES)
    generator = np.random.default_rng(0)
    tokens = generator.standard_normal((largest, lane.begin(largest).hidden.shape[1]), np.float32)
    results = [_run(lane, tokens[:size]) for size in _SIZES]
    whole_qkv, whole_logits = results[-1]
    return all(
        np.array_equal(qkv, whole_qkv[:size]) and np.array_equal(logits, whole_logits)
        for size, (qkv, logits) in zip(_SIZES, results, strict=True)
    )


def is_batch_invariant_form(form: StepForm, max_tokens: int) -> bool:
    """Runs prefixes of one sequence, and compares the logits of each one's last token.

    `max_tokens` is what a step, a sequence and the pages have room for. Writes to the first pages.
    """
    sizes = [size for size in _SIZES if size <= max_tokens]
    whole = form.execute(_prefix(max(sizes), [size - 1 for size in sizes])).copy()
    return all(
        np.array_equal(form.execute(_prefix(size, [size - 1]))[0], logits)
        for size, logits in zip(sizes, whole, strict=True)
    )


def _prefix(num_tokens: int, rows: list[int]) -> Batch:
    positions = np.arange(num_tokens, dtype=np.int32)
    return Batch(
        token_ids=positions,  # any ids do, and every vocabulary has these
        positions=positions,
        slot_mapping=positions,
        query_starts=np.array([0, num_tokens], np.int32),
        context_lens=np.array([num_tokens], np.int32),
        block_tables=np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32)[None],
        logits_rows=np.array(rows, np.int32),
    )


def _run(lane: Lane, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first segment over the tokens; the head over the first of them."""
    buffers = lane.begin(len(tokens))
    buffers.hidden[:] = tokens
    buffers.attention[:] = 0
    lane.run(0)
    qkv = buffers.qkv.copy()
    lane.run(1)
    return qkv, head(lane, np.zeros(1, np.int32)).copy()
