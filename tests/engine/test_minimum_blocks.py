"""ggml's blocks with minima, taken apart: the weights they stand for are those of gguf itself."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from engine.importers.minimum_blocks import minimum_blocks


def random_storage(quant: str, num_rows: int = 5, num_blocks: int = 3) -> np.ndarray:
    """Any bits, but for the first two float16 numbers of a block, which are of a sane size."""
    rng = np.random.default_rng(0)
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[quant]]
    data = rng.integers(0, 256, (num_rows, num_blocks, block_bytes), np.uint8)
    num_floats = 1 if quant == "Q5_0" else 2
    floats = rng.uniform(0.01, 1, (num_rows, num_blocks, num_floats)).astype(np.float16)
    data[:, :, : 2 * num_floats] = floats.view(np.uint8)
    return data.reshape(num_rows, -1)


@pytest.mark.parametrize("quant", ["Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"])
def test_the_weights_are_those_of_the_reference(quant: str) -> None:
    raw = random_storage(quant)
    blocks = minimum_blocks(quant, raw)
    assert blocks is not None
    assert blocks.values.max() < 1 << blocks.bits
    assert blocks.bits == (4 if quant.startswith("Q4") else 8)
    expected = dequantize(raw.copy(), GGMLQuantizationType[quant])
    assert np.array_equal(blocks.dequantize(), expected)


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "Q6_K", "F16", "IQ4_NL", "INT4"])
def test_other_storages_are_not_taken(quant: str) -> None:
    assert minimum_blocks(quant, np.zeros((2, 1024), np.uint8)) is None
