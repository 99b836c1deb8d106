"""Where one tensor of a safetensors model comes from: plain floats, or a quantized layer.

One interface over both, and a slice of it under a canonical name (files fuse what we keep apart).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.importers.integer_blocks import IntegerBlocks
from engine.importers.quantized_linear import QuantizedLinear
from engine.importers.tensor_store import StoredTensor

GGML_NAMES = {"F64": "F32"}
"""Storages that ggml has no name for, as what `raw` turns them into."""


class WeightSource(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def quant_type(self) -> str: ...

    def raw(self, start: int, stop: int) -> NDArray[np.uint8]: ...

    def rows(self, start: int, stop: int) -> NDArray[np.float32]: ...

    def blocks(self, start: int, stop: int) -> IntegerBlocks | None: ...


@dataclass(frozen=True, slots=True)
class PlainSource:
    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def quant_type(self) -> str:
        return GGML_NAMES.get(self.tensor.entry.dtype, self.tensor.entry.dtype)

    def raw(self, start: int, stop: int) -> NDArray[np.uint8]:
        if self.tensor.entry.dtype in GGML_NAMES:
            return self.rows(start, stop).view(np.uint8)
        return self.tensor.file.raw_rows(self.tensor.entry, start, stop)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.tensor.file.read_rows(self.tensor.entry, start, stop)

    def blocks(self, start: int, stop: int) -> IntegerBlocks | None:
        return None


@dataclass(frozen=True, slots=True)
class QuantizedSource:
    linear: QuantizedLinear

    @property
    def shape(self) -> tuple[int, ...]:
        return self.linear.shape

    @property
    def quant_type(self) -> str:
        return "INT8" if self.linear.quantization.bits == 8 else "INT4"

    def raw(self, start: int, stop: int) -> NDArray[np.uint8]:
        """One byte a value."""
        return self.linear.read(start, stop).values

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.linear.read(start, stop).dequantize()

    def blocks(self, start: int, stop: int) -> IntegerBlocks | None:
        return self.linear.read(start, stop).blocks()


@dataclass(frozen=True, slots=True)
class NamedSlice:
    """Implements `CheckpointTensor`: rows `first`.. of a source, with `offset` added to each value
    (norm weights that a format keeps around zero)."""

    name: str
    shape: tuple[int, ...]
    source: WeightSource
    first: int = 0
    offset: float = 0.0

    @property
    def quant_type(self) -> str:
        return self.source.quant_type

    def raw(self) -> NDArray[np.uint8]:
        rows = self.source.raw(self.first, self.first + self.shape[0])
        return rows if len(self.shape) == 2 else rows.reshape(1, -1)

    def dequantize(self) -> NDArray[np.float32]:
        return self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        values = self.source.rows(self.first + start, self.first + stop)
        return values + np.float32(self.offset) if self.offset else values

    def blocks(self) -> IntegerBlocks | None:
        return self.source.blocks(self.first, self.first + self.shape[0])
