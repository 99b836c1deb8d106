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
from engine.export.packing import PackedMatrix, pack, unpack


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


def encode(values: NDArray[np.float32], quant_type: str) -> Tensor:
    data = quantize(values, GGMLQuantizationType[quant_type]).view(np.uint8)
    return Tensor("t", values.shape, quant_type, data.reshape(len(values), -1))


def random_tensor(quant_type: str, rows: int = 6, cols: int = 96, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal((rows, cols), np.float32)
    return encode(values, quant_type)


@pytest.mark.parametrize(("quant_type", "bits"), [("Q4_0", 4), ("Q8_0", 8)])
def test_q4_0_and_q8_0_are_exact(quant_type: str, bits: int) -> None:
    tensor = random_tensor(quant_type)
    packed = pack([tensor])
    assert packed.bits == bits
    assert packed.data.shape == (6, 3, 4 * bits) and packed.scales.shape == (6, 3)
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
    assert np.array_equal(unpack(pack([tensor])), tensor.dequantize())


@pytest.mark.parametrize("quant_type", ["F32", "F16", "BF16", "Q4_1", "Q5_0", "Q5_1"])
def test_other_types_are_within_half_a_step_of_8_bits(quant_type: str) -> None:
    tensor = random_tensor(quant_type)
    packed = pack([tensor])
    assert packed.bits == 8
    error = np.abs(unpack(packed) - tensor.dequantize()).reshape(6, 3, 32)
    assert (error <= packed.scales[:, :, None] * np.float32(0.5001)).all()
    largest = np.abs(tensor.dequantize().reshape(6, 3, 32)).max(axis=2)
    assert np.array_equal(packed.scales, largest / np.float32(127))


VALUE = st.floats(-1e4, 1e4, width=32).map(lambda x: 0.0 if abs(x) < 1e-20 else x)


@given(values=st.lists(VALUE, min_size=64, max_size=64))
@settings(deadline=None)
def test_any_floats_are_within_half_a_step(values: list[float]) -> None:
    weights = np.array(values, np.float32).reshape(1, 64)
    packed = pack([encode(weights, "F32")])
    error = np.abs(unpack(packed) - weights).reshape(1, 2, 32)
    assert (error <= packed.scales[:, :, None] * np.float32(0.5001)).all()


def test_blocks_of_zeros_stay_zeros() -> None:
    packed = pack([encode(np.zeros((2, 64), np.float32), "F32")])
    assert not packed.scales.any() and not unpack(packed).any()


def test_stacked_matrices_lie_one_below_the_other() -> None:
    tensors = [random_tensor("Q4_0", rows, seed=rows) for rows in (4, 2, 3)]
    packed = pack(tensors)
    assert packed.bits == 4
    expected = np.concatenate([tensor.dequantize() for tensor in tensors])
    assert np.array_equal(unpack(packed), expected)


def test_a_stack_of_mixed_types_takes_8_bits_and_keeps_the_exact_ones_exact() -> None:
    tensors = [random_tensor(kind, seed=i) for i, kind in enumerate(("Q4_0", "Q8_0", "Q4_1"))]
    packed = pack(tensors)
    assert packed.bits == 8
    found = unpack(packed)
    assert np.array_equal(found[:6], tensors[0].dequantize())
    assert np.array_equal(found[6:12], tensors[1].dequantize())
    assert np.abs(found[12:] - tensors[2].dequantize()).max() <= packed.scales[12:].max() * 0.5001


def test_a_width_that_is_no_multiple_of_the_block_is_refused() -> None:
    tensor = encode(np.zeros((2, 40), np.float32), "F32")
    with pytest.raises(ImportFailed, match=r"t: 40 inputs are not a multiple of 32"):
        pack([tensor])


def test_the_even_value_is_in_the_low_nibble() -> None:
    """The layout of com.microsoft.MatMulNBits, which ggml's is not."""
    data = np.zeros((1, 1, 16), np.uint8)
    data[0, 0, 0] = 0x9A
    values = unpack(PackedMatrix(4, data, np.ones((1, 1), np.float32)))
    assert values[0, :3].tolist() == [0xA - 8, 0x9 - 8, -8]
