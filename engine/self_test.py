"""Whether this machine's matrix kernels give a token the same bits in every batch.

The numerics contract rests on it (docs/architecture.md). Measured on x86 with AVX-512 VNNI; on
other machines this small check at start tells, and `/health` shows what it found.
"""

from __future__ import annotations

import numpy as np

from engine.lane import Lane

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


def _run(lane: Lane, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first segment over the tokens; the head over the first of them."""
    buffers = lane.begin(len(tokens))
    buffers.hidden[:] = tokens
    buffers.attention[:] = 0
    lane.run(0)
    qkv = buffers.qkv.copy()
    lane.run(1)
    return qkv, lane.head(np.zeros(1, np.int32)).copy()
