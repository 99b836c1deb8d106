"""A checkpoint of true shapes and random weights, made while it is read: nothing to download.

For measuring memory and speed of models that are too large to carry around. Activations stay of
order one, so that logits are finite; the text is noise. Integer matrices are drawn directly, a
matrix at a time. The same name and seed give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.architectures.table import tensor_shapes
from engine.errors import ImportFailed
from engine.export.packing import PackedMatrix, half_scales
from engine.importers.checkpoint import CheckpointTensor
from engine.importers.integer_blocks import IntegerBlocks
from engine.importers.summary import CheckpointSummary
from engine.synthetic.tokenizer import CHAT_TEMPLATE, synthetic_tokenizer

BLOCK_SIZE = 32
HEAD_BITS = 8
_ROW_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class SyntheticTensor:
    """One tensor: drawn anew, and the same, whenever it is asked for."""

    name: str
    shape: tuple[int, ...]
    seed: int
    quant_type: str = "F32"

    def raw(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.dequantize()).reshape(self.shape[0], -1).view(np.uint8)

    def dequantize(self) -> NDArray[np.float32]:
        return self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        if len(self.shape) == 1:
            return self._vector()[start:stop]
        first = start // _ROW_CHUNK
        chunks = [self._chunk(index) for index in range(first, -(-stop // _ROW_CHUNK))]
        offset = first * _ROW_CHUNK
        return np.concatenate(chunks)[start - offset : stop - offset]

    def blocks(self) -> IntegerBlocks | None:
        return None

    def _vector(self) -> NDArray[np.float32]:
        """Norm weights are near one, biases near zero."""
        values = random(self.name, self.seed).standard_normal(self.shape, np.float32)
        mean = 0 if self.name.endswith("_bias") else 1
        return np.asarray(mean + values / np.float32(16), np.float32)

    def _chunk(self, index: int) -> NDArray[np.float32]:
        num_rows = min(_ROW_CHUNK, self.shape[0] - index * _ROW_CHUNK)
        values = random(f"{self.name}[{index}]", self.seed).standard_normal(
            (num_rows, self.shape[1]), np.float32
        )
        return values * np.float32(self.shape[1] ** -0.5)


@dataclass(frozen=True, slots=True)
class SyntheticCheckpoint:
    """`title` is of the model that it is like."""

    config: ModelConfig
    title: str
    bits: int
    seed: int = 0

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @property
    def tokenizer_json(self) -> str:
        return synthetic_tokenizer(self.config.vocab_size)

    @property
    def chat_template(self) -> str | None:
        return CHAT_TEMPLATE

    @property
    def summary(self) -> CheckpointSummary:
        num_parameters = sum(int(np.prod(shape)) for shape in tensor_shapes(self.config).values())
        return CheckpointSummary(
            title=f"random weights, shaped like {self.title}",
            licence="none",
            quantization=f"INT{self.bits}",
            pre_tokenizer="bytes",
            num_parameters=num_parameters,
            file_name="none",
            num_file_bytes=0,
        )

    def __contains__(self, name: str) -> bool:
        return name in tensor_shapes(self.config)

    def tensor(self, name: str) -> CheckpointTensor:
        """Raises ImportFailed for a tensor that such a model does not have."""
        shape = tensor_shapes(self.config).get(name)
        if shape is None:
            raise ImportFailed(f"a model like {self.title} has no tensor {name!r}")
        return SyntheticTensor(name, shape, self.seed)

    def pack(self, name: str, tensors: Sequence[CheckpointTensor]) -> PackedMatrix:
        """A `Packer`: integers and scales of a stacked matrix, drawn without a detour by floats.

        The embedding and the head have 8 bits, as quantized models have them.
        """
        is_layer = name.startswith("layers.")
        bits = self.bits if is_layer else HEAD_BITS
        num_rows, num_cols = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        num_blocks = num_cols // BLOCK_SIZE
        rng = random(name, self.seed)
        block_bytes = BLOCK_SIZE * bits // 8
        data = np.frombuffer(rng.bytes(num_rows * num_blocks * block_bytes), np.uint8)
        # Levels are uniform: their deviation is 2 ** bits / sqrt(12), the weights' is 1 / sqrt(K).
        scale = np.sqrt(12 / num_cols) / (1 << bits)
        spread = rng.random((num_rows, num_blocks), np.float32) + np.float32(0.5)
        return PackedMatrix(
            bits=bits,
            data=data.reshape(num_rows, num_blocks, block_bytes),
            scales=half_scales(spread * np.float32(scale)),
            block_size=BLOCK_SIZE,
        )


def random(name: str, seed: int) -> np.random.Generator:
    """A generator of its own for everything that has a name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
