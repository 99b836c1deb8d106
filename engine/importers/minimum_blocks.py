"""ggml's storages whose blocks have a real-valued minimum or 5 bits, taken apart exactly.

Source of the layouts: `ggml-common.h` of llama.cpp. What has an integer zero and 4 or 8 bits is in
`gguf_blocks.py`; what has blocks of 16 is not here, since a panel's block has 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K
from numpy.typing import NDArray

from engine.kernels.panel_matrix import BLOCK_INPUTS, Blocks

Bytes = NDArray[np.uint8]
_K_BLOCKS = 8
_SCALE = 2


def minimum_blocks(quant_type: str, raw: Bytes) -> Blocks | None:
    """`raw` [rows, bytes per row]; None for every other storage."""
    read = _READERS.get(quant_type)
    if read is None:
        return None
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[quant_type]]
    return read(raw.reshape(len(raw), -1, block_bytes))


def _q4_1(blocks: Bytes) -> Blocks:
    return _blocks(4, _halves(blocks[:, :, 2 * _SCALE :]), _float(blocks, 0), _float(blocks, 1))


def _q5_0(blocks: Bytes) -> Blocks:
    scales = _float(blocks, 0)
    return _blocks(8, _with_fifth_bit(blocks[:, :, _SCALE:]), scales, np.float32(-16) * scales)


def _q5_1(blocks: Bytes) -> Blocks:
    values = _with_fifth_bit(blocks[:, :, 2 * _SCALE :])
    return _blocks(8, values, _float(blocks, 0), _float(blocks, 1))


def _q4_k(blocks: Bytes) -> Blocks:
    scales, minima = _k_scales(blocks)
    return _blocks(4, _k_nibbles(blocks[:, :, 2 * _SCALE + Q4_K.K_SCALE_SIZE :]), scales, minima)


def _q5_k(blocks: Bytes) -> Blocks:
    scales, minima = _k_scales(blocks)
    rest = blocks[:, :, 2 * _SCALE + Q4_K.K_SCALE_SIZE :]
    shifts = np.arange(_K_BLOCKS, dtype=np.uint8)[:, None]
    high = rest[:, :, None, :BLOCK_INPUTS] >> shifts & np.uint8(1)
    values = _k_nibbles(rest[:, :, BLOCK_INPUTS:]) | high << np.uint8(4)
    return _blocks(8, values, scales, minima)


_READERS: Mapping[str, Callable[[Bytes], Blocks]] = MappingProxyType(
    {"Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k}
)


def _blocks(
    bits: int, values: Bytes, scales: NDArray[np.float32], minima: NDArray[np.float32]
) -> Blocks:
    num_rows = len(values)
    return Blocks(
        bits,
        values.reshape(num_rows, -1),
        scales.reshape(num_rows, -1),
        minima.reshape(num_rows, -1),
    )


def _float(blocks: Bytes, index: int) -> NDArray[np.float32]:
    """[rows, blocks]: the float16 number `index` of each block."""
    data = np.ascontiguousarray(blocks[:, :, index * _SCALE : (index + 1) * _SCALE])
    return data.view(np.float16)[:, :, 0].astype(np.float32)


def _halves(packed: Bytes) -> Bytes:
    """Values k and k + half a block share a byte."""
    return np.concatenate([packed & 0xF, packed >> 4], axis=2)


def _with_fifth_bit(data: Bytes) -> Bytes:
    """4 bytes of fifth bits, then the nibbles."""
    high = np.unpackbits(np.ascontiguousarray(data[:, :, :4]), axis=2, bitorder="little")
    return _halves(data[:, :, 4:]) | high << np.uint8(4)


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(scales, minima) [rows, blocks, 8]: 6-bit numbers times the block's two floats."""
    packed = np.ascontiguousarray(blocks[:, :, 2 * _SCALE : 2 * _SCALE + Q4_K.K_SCALE_SIZE])
    scales, minima = Q4_K.get_scale_min(packed.reshape(-1, Q4_K.K_SCALE_SIZE))
    shape = (*blocks.shape[:2], _K_BLOCKS)
    scale, minimum = _float(blocks, 0)[:, :, None], _float(blocks, 1)[:, :, None]
    return (
        scale * scales.reshape(shape).astype(np.float32),
        -(minimum * minima.reshape(shape).astype(np.float32)),
    )


def _k_nibbles(packed: Bytes) -> Bytes:
    """[rows, blocks, 8, 32]: 32 bytes hold one block of values low and the next one high."""
    pairs = packed.reshape(*packed.shape[:2], _K_BLOCKS // 2, 1, BLOCK_INPUTS)
    values = np.concatenate([pairs & 0xF, pairs >> 4], axis=3)
    return values.reshape(*packed.shape[:2], _K_BLOCKS, BLOCK_INPUTS)
