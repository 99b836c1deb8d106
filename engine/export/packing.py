"""Checkpoint matrices to the integer blocks that MatMulNBits reads, without ever losing bits twice.

Q4_0 and Q8_0 map exactly. Everything else goes to 8 bits, symmetric, in blocks of 32 inputs:
ggml's other 4-bit types have a real-valued minimum per block, which MatMulNBits cannot express,
and re-quantizing 4 bits to 4 bits ruins the model (docs/decisions.md).
Knows nothing of graphs or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ImportFailed
from engine.importers.checkpoint import CheckpointTensor

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """weight[n, k] = (q[n, k] - 2 ** (bits - 1)) * scales[n, k // 32].

    `data` [N, K / 32, 4 * bits] uint8, 4-bit values with the even k in the low nibble (the layout
    of com.microsoft.MatMulNBits); `scales` [N, K / 32] float32.
    """

    bits: int
    data: NDArray[np.uint8]
    scales: NDArray[np.float32]

    @property
    def num_rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def num_cols(self) -> int:
        return int(self.data.shape[1]) * BLOCK_SIZE


def pack(tensors: Sequence[CheckpointTensor]) -> PackedMatrix:
    """Stacks matrices along their rows and packs them with the fewest bits that keep them all.

    Raises ImportFailed if the number of inputs is not a multiple of 32.
    """
    for tensor in tensors:
        if tensor.shape[1] % BLOCK_SIZE:
            raise ImportFailed(
                f"{tensor.name}: {tensor.shape[1]} inputs are not a multiple of {BLOCK_SIZE}"
            )
    parts = [_pack_one(tensor, min_bits=_min_bits(tensors)) for tensor in tensors]
    return PackedMatrix(
        bits=parts[0].bits,
        data=np.concatenate([part.data for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
    )


def unpack(matrix: PackedMatrix) -> NDArray[np.float32]:
    """[N, K] float32: the values that the packed form stands for."""
    q = matrix.data if matrix.bits == 8 else _unpack_nibbles(matrix.data)
    centred = q.astype(np.float32) - np.float32(1 << (matrix.bits - 1))
    return (centred * matrix.scales[:, :, None]).reshape(matrix.num_rows, matrix.num_cols)


def _min_bits(tensors: Sequence[CheckpointTensor]) -> int:
    return 4 if all(tensor.quant_type == "Q4_0" for tensor in tensors) else 8


def _pack_one(tensor: CheckpointTensor, min_bits: int) -> PackedMatrix:
    if tensor.quant_type == "Q4_0":
        packed = _pack_q4_0(tensor.raw())
        return packed if min_bits == 4 else _widen(packed)
    if tensor.quant_type == "Q8_0":
        return _pack_q8_0(tensor.raw())
    return _quantize_8bit(tensor.dequantize())


def _split_blocks(
    raw: NDArray[np.uint8], block_bytes: int
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """ggml's Q4_0 and Q8_0 blocks are a float16 scale followed by the values."""
    blocks = raw.reshape(raw.shape[0], -1, block_bytes)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    return scales.astype(np.float32), blocks[:, :, 2:]


def _pack_q8_0(raw: NDArray[np.uint8]) -> PackedMatrix:
    scales, values = _split_blocks(raw, 2 + BLOCK_SIZE)
    return PackedMatrix(bits=8, data=values ^ np.uint8(0x80), scales=scales)


def _pack_q4_0(raw: NDArray[np.uint8]) -> PackedMatrix:
    """ggml keeps values k and k + 16 in one byte, MatMulNBits k and k + 1."""
    scales, values = _split_blocks(raw, 2 + BLOCK_SIZE // 2)
    q = np.concatenate([values & 0xF, values >> 4], axis=2)
    return PackedMatrix(bits=4, data=q[:, :, 0::2] | (q[:, :, 1::2] << 4), scales=scales)


def _unpack_nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    q = np.empty((*data.shape[:2], BLOCK_SIZE), np.uint8)
    q[:, :, 0::2] = data & 0xF
    q[:, :, 1::2] = data >> 4
    return q


def _widen(packed: PackedMatrix) -> PackedMatrix:
    """The same values in 8 bits."""
    offset = np.uint8((1 << 7) - (1 << 3))
    return PackedMatrix(bits=8, data=_unpack_nibbles(packed.data) + offset, scales=packed.scales)


def _quantize_8bit(weights: NDArray[np.float32]) -> PackedMatrix:
    blocks = weights.reshape(weights.shape[0], -1, BLOCK_SIZE)
    scales = np.abs(blocks).max(axis=2) / np.float32(127)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    q = np.rint(blocks * inverse[:, :, None]).astype(np.int16) + 128
    return PackedMatrix(bits=8, data=q.astype(np.uint8), scales=scales)
