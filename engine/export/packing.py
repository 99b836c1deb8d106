"""Checkpoint matrices to the integer blocks that MatMulNBits reads, without ever losing bits twice.

Storages of integers with an integer zero (ggml's Q4_0 and Q8_0, AWQ, GPTQ) map exactly. Everything
else goes to 8 bits, symmetric, in blocks of 32 inputs: ggml's other 4-bit types have a real-valued
minimum per block, which MatMulNBits cannot express, and re-quantizing 4 bits to 4 bits ruins the
model (docs/decisions.md). Knows nothing of graphs or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import ImportFailed
from engine.importers.checkpoint import CheckpointTensor
from engine.importers.integer_blocks import IntegerBlocks

BLOCK_SIZE = 32
"""The widest block of which MatMulNBits gives the same rows for every number of tokens."""

DENSE_BITS = 32
_LEAST_HALF, _LARGEST_HALF = np.float32(2**-14), np.float32(65504)
MAX_CHUNK_ELEMENTS = 1 << 22
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """weight[n, k] = (q[n, k] - zero[n, k // block_size]) * scales[n, k // block_size].

    The layout of com.microsoft.MatMulNBits: `data` [N, blocks, block_size * bits / 8] uint8, 4-bit
    values with the even k in the low nibble; `scales` [N, blocks] float32; `zero_points`
    [N, ceil(blocks * bits / 8)] uint8, packed like the data, None when every zero is
    2 ** (bits - 1). `columns` is K where the last block is not full.

    `bits` 32 is a matrix that is not quantized: `data` is float32 [K, N], as MatMul reads it, and
    there are neither scales nor zero points.
    """

    bits: int
    data: NDArray[np.uint8] | NDArray[np.float32]
    scales: NDArray[np.float32] | None
    block_size: int = BLOCK_SIZE
    zero_points: NDArray[np.uint8] | None = None
    columns: int | None = None

    @property
    def num_rows(self) -> int:
        return int(self.data.shape[1 if self.bits == DENSE_BITS else 0])

    @property
    def num_cols(self) -> int:
        if self.bits == DENSE_BITS:
            return int(self.data.shape[0])
        return self.columns or int(self.data.shape[1]) * self.block_size


Packer = Callable[[str, Sequence[CheckpointTensor]], PackedMatrix]
"""(canonical name of a stacked matrix, such as `layers.3.qkv`; its parts) → the stack, packed.

Raises ImportFailed for values that cannot be packed.
"""


def pack_auto(name: str, tensors: Sequence[CheckpointTensor]) -> PackedMatrix:
    """Integers stay what they are, everything else takes 8 bits."""
    parts = [tensor.blocks() or quantize_8bit(tensor) for tensor in tensors]
    for tensor, part in zip(tensors, parts, strict=True):
        check_finite(tensor, part.scales)
    return pack_blocks(stack(parts))


def pack_int8(name: str, tensors: Sequence[CheckpointTensor]) -> PackedMatrix:
    """8 bits, whatever the file holds."""
    return pack_blocks(stack([quantize_8bit(tensor) for tensor in tensors]))


def pack_dense(name: str, tensors: Sequence[CheckpointTensor]) -> PackedMatrix:
    """float32, for references."""
    num_rows = sum(tensor.shape[0] for tensor in tensors)
    data = np.empty((tensors[0].shape[1], num_rows), np.float32)
    row = 0
    for tensor in tensors:
        for chunk in row_chunks(tensor):
            data[:, row : row + len(chunk)] = chunk.T
            row += len(chunk)
    return PackedMatrix(DENSE_BITS, data, scales=None)


PACKERS: Mapping[str, Packer] = MappingProxyType(
    {"auto": pack_auto, "int8": pack_int8, "f32": pack_dense}
)
"""By the name of the weight format that is asked for."""


def row_chunks(tensor: CheckpointTensor) -> Iterator[NDArray[np.float32]]:
    """A matrix some rows at a time. Raises ImportFailed for values that are no numbers."""
    num_rows, num_cols = tensor.shape
    step = max(1, MAX_CHUNK_ELEMENTS // num_cols)
    for start in range(0, num_rows, step):
        chunk = tensor.rows(start, min(start + step, num_rows))
        check_finite(tensor, chunk)
        yield chunk


def check_finite(tensor: CheckpointTensor, values: NDArray[np.float32]) -> None:
    if not np.isfinite(values).all():
        raise ImportFailed(
            f"tensor {tensor.name!r} holds values that are no number; download the model again"
        )


def quantize_8bit(tensor: CheckpointTensor) -> IntegerBlocks:
    """Round to nearest, symmetric, the largest value of a block at 127."""
    parts = [_quantize_rows(chunk) for chunk in row_chunks(tensor)]
    scales = np.concatenate([scales for _, scales in parts])
    values = np.concatenate([values for values, _ in parts])
    return IntegerBlocks(8, BLOCK_SIZE, values, scales, np.full(scales.shape, 128, np.uint8))


def _quantize_rows(weights: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(values [N, K], scales [N, blocks])."""
    num_cols = weights.shape[1]
    blocks = _padded(weights, BLOCK_SIZE).reshape(len(weights), -1, BLOCK_SIZE)
    scales = half_scales(np.abs(blocks).max(axis=2) / np.float32(127))
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    q = np.rint(blocks * inverse[:, :, None]).astype(np.int16) + 128
    return q.astype(np.uint8).reshape(len(weights), -1)[:, :num_cols], scales


def half_scales(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest float16 numbers, which the CPU's kernels read at half the bytes; those outside
    its range stay as they are."""
    size = np.abs(scales)
    fits = (size >= _LEAST_HALF) & (size <= _LARGEST_HALF)
    return np.where(fits, np.where(fits, scales, 0).astype(np.float16).astype(np.float32), scales)


def _padded(values: NDArray[Number], multiple: int) -> NDArray[Number]:
    """[N, K] with zeros behind, up to a multiple."""
    missing = -values.shape[1] % multiple
    return np.pad(values, ((0, 0), (0, missing))) if missing else values


def stack(parts: Sequence[IntegerBlocks]) -> IntegerBlocks:
    """One below the other, with the bits and the group size that keep them all exact."""
    bits = max(part.bits for part in parts)
    size = min([BLOCK_SIZE, *(part.group_size for part in parts)])
    parts = [_widened(_regrouped(part, size), bits) for part in parts]
    return IntegerBlocks(
        bits,
        size,
        values=np.concatenate([part.values for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zeros=np.concatenate([part.zeros for part in parts]),
    )


def _regrouped(part: IntegerBlocks, size: int) -> IntegerBlocks:
    """The same weights in groups of `size`, which divides the group size."""
    if part.group_size == size:
        return part
    times, count = part.group_size // size, -(-part.values.shape[1] // size)
    scales = np.repeat(part.scales, times, axis=1)[:, :count]
    zeros = np.repeat(part.zeros, times, axis=1)[:, :count]
    return IntegerBlocks(part.bits, size, part.values, scales, zeros)


def _widened(part: IntegerBlocks, bits: int) -> IntegerBlocks:
    """The same weights in more bits, a middle zero staying the middle."""
    if part.bits == bits:
        return part
    offset = np.uint8((1 << (bits - 1)) - (1 << (part.bits - 1)))
    values, zeros = part.values + offset, part.zeros + offset
    return IntegerBlocks(bits, part.group_size, values, part.scales, zeros)


def pack_blocks(blocks: IntegerBlocks) -> PackedMatrix:
    """In groups of 32 inputs or fewer: see `BLOCK_SIZE`."""
    blocks = _regrouped(blocks, min(BLOCK_SIZE, blocks.group_size))
    num_rows, num_cols = blocks.values.shape
    size, num_blocks = blocks.group_size, blocks.scales.shape[1]
    values = _padded(blocks.values, size)
    data = values if blocks.bits == 8 else _pack_nibbles(values)
    is_centred = bool((blocks.zeros == 1 << (blocks.bits - 1)).all())
    zeros = blocks.zeros if blocks.bits == 8 else _pack_nibbles(_padded(blocks.zeros, 2))
    return PackedMatrix(
        bits=blocks.bits,
        data=data.reshape(num_rows, num_blocks, size * blocks.bits // 8),
        scales=blocks.scales,
        block_size=size,
        zero_points=None if is_centred else zeros,
        columns=num_cols if num_cols % size else None,
    )


def narrowed(matrix: PackedMatrix) -> PackedMatrix:
    """The same weights in blocks of 32 or fewer: see `BLOCK_SIZE`."""
    if matrix.scales is None or matrix.block_size <= BLOCK_SIZE:
        return matrix
    return pack_blocks(unpack_blocks(matrix))


def _pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, K] → [N, K / 2]."""
    return values[:, 0::2] | (values[:, 1::2] << np.uint8(4))


def unpack(matrix: PackedMatrix) -> NDArray[np.float32]:
    """[N, K] float32: the values that the packed form stands for."""
    if matrix.scales is None:
        return np.ascontiguousarray(matrix.data.T, np.float32)
    return unpack_blocks(matrix).dequantize()


def unpack_blocks(matrix: PackedMatrix) -> IntegerBlocks:
    """The integers of a matrix that has some. The inverse of `pack_blocks`."""
    assert matrix.scales is not None, "a dense matrix has no blocks"
    data = matrix.data.astype(np.uint8, copy=False).reshape(matrix.num_rows, -1)
    if matrix.zero_points is None:
        zeros = np.full(matrix.scales.shape, 1 << (matrix.bits - 1), np.uint8)
    else:
        zeros = _values(matrix.zero_points, matrix.bits)[:, : matrix.scales.shape[1]]
    values = _values(data, matrix.bits)[:, : matrix.num_cols]
    return IntegerBlocks(matrix.bits, matrix.block_size, values, matrix.scales, zeros)


def _values(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """[N, bytes] → [N, bytes * 8 / bits]."""
    if bits == 8:
        return packed
    values = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    values[:, 0::2] = packed & 0xF
    values[:, 1::2] = packed >> 4
    return values
