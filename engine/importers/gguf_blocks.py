"""ggml's storages that are plain integers with a scale, taken apart exactly: Q4_0 and Q8_0.

A block of either is a float16 scale and 32 values. Source: `ggml-common.h` of llama.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.importers.integer_blocks import IntegerBlocks

BLOCK_SIZE = 32
SCALE_BYTES = 2


def integer_blocks(quant_type: str, raw: NDArray[np.uint8]) -> IntegerBlocks | None:
    """`raw` [rows, bytes per row]; None for every other storage."""
    if quant_type not in ("Q4_0", "Q8_0"):
        return None
    bits = 4 if quant_type == "Q4_0" else 8
    scales, packed = _split(raw, SCALE_BYTES + BLOCK_SIZE * bits // 8)
    if bits == 8:
        values = packed ^ np.uint8(0x80)
    else:
        # Values k and k + 16 of a block share a byte.
        values = np.concatenate([packed & 0xF, packed >> 4], axis=2)
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    return IntegerBlocks(bits, BLOCK_SIZE, values.reshape(len(raw), -1), scales, zeros)


def _split(
    raw: NDArray[np.uint8], block_bytes: int
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """(scales [rows, blocks], packed values [rows, blocks, bytes])."""
    blocks = raw.reshape(len(raw), -1, block_bytes)
    scales = np.ascontiguousarray(blocks[:, :, :SCALE_BYTES]).view(np.float16)[:, :, 0]
    return scales.astype(np.float32), blocks[:, :, SCALE_BYTES:]
