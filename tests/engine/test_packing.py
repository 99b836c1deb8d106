"""Packing: exact where the file's blocks are MatMulNBits's, within half a step elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import ImportFailed
from engine.export.packing import (
    PackedMatrix,
    Packer,
    half_scales,
    narrowed,
    pack_auto,
    pack_dense,
    pack_int8,
    unpack,
)
from engine.importers.gguf_blocks import integer_blocks
from engine.importers.integer_blocks import IntegerBlocks


@dataclass(frozen=True)
class Tensor:
    """A `CheckpointTensor` in memory."""

    name: str
    shape: tuple[int, ...]
    quant_type: str
    data: NDArray[np.uint8]

    def raw(self) -> NDArray[np.uint8]:
        return self.data

    def dequantize(self) -> NDArray[np.float32]:
        values = dequantize(self.data, GGMLQuantizationType[self.quant_type])
        return np.asarray(values.reshape(self.shape), np.float32)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.dequantize()[start:stop]

    def blocks(self) -> IntegerBlocks | None:
        return integer_blocks(self.quant_type, self.raw())


def encode(values: NDArray[np.float32], quant_type: str) -> Tensor:
    data = quantize(values, GGMLQuantizationType[quant_type]).view(np.uint8)
    return Tensor("t", values.shape, quant_type, data.reshape(len(values), -1))


def random_tensor(quant_type: str, rows: int = 6, cols: int = 96, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal((rows, cols), np.float32)
    return encode(values, quant_type)


def scales_of(packed: PackedMatrix) -> NDArray[np.float32]:
    assert packed.scales is not None
    return packed.scales


@pytest.mark.parametrize(("quant_type", "bits"), [("Q4_0", 4), ("Q8_0", 8)])
def test_q4_0_and_q8_0_are_exact(quant_type: str, bits: int) -> None:
    tensor = random_tensor(quant_type)
    packed = pack_auto("t", [tensor])
    assert packed.bits == bits
    assert packed.data.shape == (6, 3, 4 * bits) and scales_of(packed).shape == (6, 3)
    assert (packed.num_rows, packed.num_cols) == (6, 96)
    assert np.array_equal(unpack(packed), tensor.dequantize())


@pytest.mark.parametrize("quant_type", ["Q4_0", "Q8_0"])
def test_every_level_of_an_exact_type_survives(quant_type: str) -> None:
    """Blocks written by hand: a scale of 0.5 and every possible stored value."""
    scale = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    count = 16 if quant_type == "Q4_0" else 32
    values = np.arange(256, dtype=np.uint8).reshape(-1, count)
    blocks = np.concatenate([np.tile(scale, (len(values), 1)), values], axis=1)
    tensor = Tensor("t", (1, 32 * len(values)), quant_type, blocks.reshape(1, -1))
    assert np.array_equal(unpack(pack_auto("t", [tensor])), tensor.dequantize())


@pytest.mark.parametrize("quant_type", ["F32", "F16", "BF16", "Q4_1", "Q5_0", "Q5_1"])
def test_other_types_are_within_half_a_step_of_8_bits(quant_type: str) -> None:
    tensor = random_tensor(quant_type)
    packed = pack_auto("t", [tensor])
    assert packed.bits == 8
    error = np.abs(unpack(packed) - tensor.dequantize()).reshape(6, 3, 32)
    assert (error <= scales_of(packed)[:, :, None] * np.float32(0.5001)).all()
    largest = np.abs(tensor.dequantize().reshape(6, 3, 32)).max(axis=2)
    expected = (largest / np.float32(127)).astype(np.float16)  # half of a kernel's bytes
    assert np.array_equal(scales_of(packed), expected)


VALUE = st.floats(-1e4, 1e4, width=32).map(lambda x: 0.0 if abs(x) < 1e-20 else x)


@given(values=st.lists(VALUE, min_size=64, max_size=64))
@settings(deadline=None)
def test_any_floats_are_within_half_a_step(values: list[float]) -> None:
    weights = np.array(values, np.float32).reshape(1, 64)
    packed = pack_auto("t", [encode(weights, "F32")])
    error = np.abs(unpack(packed) - weights).reshape(1, 2, 32)
    assert (error <= scales_of(packed)[:, :, None] * np.float32(0.5001)).all()


def test_blocks_of_zeros_stay_zeros() -> None:
    packed = pack_auto("t", [encode(np.zeros((2, 64), np.float32), "F32")])
    assert not scales_of(packed).any() and not unpack(packed).any()


def test_stacked_matrices_lie_one_below_the_other() -> None:
    tensors = [random_tensor("Q4_0", rows, seed=rows) for rows in (4, 2, 3)]
    packed = pack_auto("t", tensors)
    assert packed.bits == 4
    expected = np.concatenate([tensor.dequantize() for tensor in tensors])
    assert np.array_equal(unpack(packed), expected)


def test_a_stack_of_mixed_types_takes_8_bits_and_keeps_the_exact_ones_exact() -> None:
    tensors = [random_tensor(kind, seed=i) for i, kind in enumerate(("Q4_0", "Q8_0", "Q4_1"))]
    packed = pack_auto("t", tensors)
    assert packed.bits == 8
    found = unpack(packed)
    assert np.array_equal(found[:6], tensors[0].dequantize())
    assert np.array_equal(found[6:12], tensors[1].dequantize())
    assert (
        np.abs(found[12:] - tensors[2].dequantize()).max() <= scales_of(packed)[12:].max() * 0.5001
    )


@pytest.mark.parametrize("cols", [40, 33, 7])
def test_the_last_block_may_be_cut_off(cols: int) -> None:
    values = np.random.default_rng(cols).standard_normal((3, cols), np.float32)
    packed = pack_auto("t", [encode(values, "F32")])
    assert (packed.num_rows, packed.num_cols) == (3, cols)
    assert packed.data.shape[1] == -(-cols // 32)
    assert np.abs(unpack(packed) - values).max() <= np.abs(values).max() / 127 * 0.5001


def test_the_even_value_is_in_the_low_nibble() -> None:
    """The layout of com.microsoft.MatMulNBits, which ggml's is not."""
    data = np.zeros((1, 1, 16), np.uint8)
    data[0, 0, 0] = 0x9A
    values = unpack(PackedMatrix(4, data, np.ones((1, 1), np.float32)))
    assert values[0, :3].tolist() == [0xA - 8, 0x9 - 8, -8]


def group_blocks(bits: int, group_size: int, cols: int, seed: int = 0) -> IntegerBlocks:
    rng = np.random.default_rng(seed)
    groups = -(-cols // group_size)
    return IntegerBlocks(
        bits=bits,
        group_size=group_size,
        values=rng.integers(0, 1 << bits, (5, cols), np.uint8),
        scales=rng.random((5, groups), np.float32),
        zeros=rng.integers(0, 1 << bits, (5, groups), np.uint8),
    )


@dataclass(frozen=True)
class IntegerTensor(Tensor):
    integers: IntegerBlocks

    def dequantize(self) -> NDArray[np.float32]:
        return self.integers.dequantize()

    def blocks(self) -> IntegerBlocks:
        return self.integers


def integer_tensor(blocks: IntegerBlocks) -> IntegerTensor:
    return IntegerTensor("t", blocks.values.shape, f"INT{blocks.bits}", blocks.values, blocks)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "cols"), [(16, 64), (32, 96), (64, 192), (128, 384)])
def test_integer_zeros_and_wide_groups_are_exact(bits: int, group_size: int, cols: int) -> None:
    blocks = group_blocks(bits, group_size, cols)
    packed = pack_auto("t", [integer_tensor(blocks)])
    assert (packed.bits, packed.block_size) == (bits, min(group_size, 32))
    num_blocks = cols // packed.block_size
    assert packed.zero_points is not None
    assert packed.zero_points.shape == (5, -(-num_blocks * bits // 8))
    assert np.array_equal(unpack(packed), blocks.dequantize())


def test_a_stack_keeps_the_finest_groups_the_most_bits_and_every_zero() -> None:
    parts = [group_blocks(4, 128, 256, 1), group_blocks(8, 64, 256, 2), group_blocks(4, 16, 256, 3)]
    tensors = [integer_tensor(part) for part in parts] + [random_tensor("Q4_0", cols=256)]
    packed = pack_auto("t", tensors)
    assert (packed.bits, packed.block_size) == (8, 16)
    expected = np.concatenate([tensor.dequantize() for tensor in tensors])
    assert np.array_equal(unpack(packed), expected)


def test_zeros_in_the_middle_are_left_out() -> None:
    blocks = group_blocks(4, 32, 64)
    centred = IntegerBlocks(4, 32, blocks.values, blocks.scales, np.full_like(blocks.zeros, 8))
    assert pack_auto("t", [integer_tensor(centred)]).zero_points is None


def test_what_a_packer_made_of_wide_blocks_is_narrowed_exactly() -> None:
    rng = np.random.default_rng(5)
    wide = PackedMatrix(
        bits=4,
        data=rng.integers(0, 256, (3, 3, 64), np.uint8),
        scales=rng.random((3, 3), np.float32),
        block_size=128,
        zero_points=rng.integers(0, 256, (3, 2), np.uint8),
    )
    narrow = narrowed(wide)
    assert narrow.block_size == 32 and narrow.data.shape == (3, 12, 16)
    assert np.array_equal(unpack(narrow), unpack(wide))
    assert narrowed(narrow) is narrow


def test_dense_matrices_are_kept_as_matmul_reads_them() -> None:
    tensors = [random_tensor("F32", 6, seed=1), random_tensor("Q4_1", 4, seed=2)]
    packed = pack_dense("t", tensors)
    expected = np.concatenate([tensor.dequantize() for tensor in tensors])
    assert (packed.bits, packed.scales) == (32, None)
    assert np.array_equal(packed.data, expected.T) and np.array_equal(unpack(packed), expected)
    assert (packed.num_rows, packed.num_cols) == (10, 96)


def test_8_bits_can_be_asked_for() -> None:
    packed = pack_int8("t", [random_tensor("Q4_0")])
    assert packed.bits == 8 and packed.zero_points is None


@pytest.mark.parametrize("packer", [pack_auto, pack_int8, pack_dense])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused(packer: Packer, value: float) -> None:
    values = np.zeros((2, 32), np.float32)
    values[1, 3] = value
    with pytest.raises(ImportFailed, match="'t' holds values that are no number"):
        packer("t", [encode(values, "F32")])


def test_scales_that_are_no_numbers_are_refused() -> None:
    blocks = group_blocks(4, 32, 64)
    blocks.scales[2, 1] = np.nan
    with pytest.raises(ImportFailed, match="'t' holds values that are no number"):
        pack_auto("t", [integer_tensor(blocks)])


@given(st.floats(2.0**-14, 65504, width=32))
def test_scales_within_the_range_of_float16_are_its_nearest_numbers(scale: float) -> None:
    for sign in (1, -1):
        scales = np.array([sign * scale], np.float32)
        assert half_scales(scales)[0] == np.float32(np.float16(scales[0]))


@pytest.mark.parametrize("scale", [0.0, 1e-5, 2.0**-15, 65505.0, 1e6])
def test_scales_beyond_the_range_of_float16_stay(scale: float) -> None:
    scales = np.array([scale, -scale], np.float32)
    assert np.array_equal(half_scales(scales), scales)
