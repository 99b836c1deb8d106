"""The one view that every importer gives of a checkpoint: lazy tensors under canonical names.

Canonical names: `embed`, `final_norm`, `lm_head` (absent when tied) and, per layer i,
`layers.{i}.` + `attn_norm q k v o mlp_norm gate up down`. Matrices are [rows = outputs,
cols = inputs]. Rows of `q` and `k` are in half-split RoPE order whatever the file's order was.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig


class CheckpointTensor(Protocol):
    """One tensor. Nothing is read before a method is called."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def quant_type(self) -> str:
        """ggml's name of the storage: `F32 F16 BF16 Q4_0 Q4_1 Q8_0 Q4_K …`."""
        ...

    def raw(self) -> NDArray[np.uint8]:
        """[rows, bytes per row] in the file's own encoding; may be a view of the mapped file."""
        ...

    def dequantize(self) -> NDArray[np.float32]:
        """The whole tensor in its shape, float32."""
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
