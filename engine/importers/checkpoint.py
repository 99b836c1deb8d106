"""The one view that every importer gives of a checkpoint: lazy tensors under canonical names.

Canonical names: `embed`, `final_norm`, `lm_head` (absent when tied) and, per layer i,
`layers.{i}.` + a part (`architectures.table.tensor_shapes` lists them). Matrices are
[rows = outputs, cols = inputs]. Rows of `q` and `k` are in half-split RoPE order whatever the
file's order was.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.importers.integer_blocks import IntegerBlocks


class CheckpointTensor(Protocol):
    """One tensor. Nothing is read before a method is called; nothing read is kept."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def quant_type(self) -> str:
        """ggml's name of the storage, `F32 F16 BF16 Q4_0 Q4_1 Q8_0 Q4_K …`, or `INT4`, `INT8`
        for what only `blocks` describes."""
        ...

    def raw(self) -> NDArray[np.uint8]:
        """[rows, bytes per row] as `quant_type` says; may be a view of the mapped file."""
        ...

    def dequantize(self) -> NDArray[np.float32]:
        """The whole tensor in its shape, float32."""
        ...

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop of a matrix, dequantized: what bounds the memory of large ones."""
        ...

    def blocks(self) -> IntegerBlocks | None:
        """The same weights as integers, exactly; None when the storage is not made of them."""
        ...


class Checkpoint(Protocol):
    """A model as found on disk. `digest` is a SHA-256 of the source file(s), in hex."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def digest(self) -> str: ...

    @property
    def tokenizer_json(self) -> str: ...

    @property
    def chat_template(self) -> str | None: ...

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> CheckpointTensor:
        """Raises ImportFailed naming the tensor if it is missing or of a wrong shape."""
        ...
