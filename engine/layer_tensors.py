"""What a decoder layer is made of, whatever file it comes from: stacked matrices and small vectors.

The stacks are those of `export.model`: what one multiplication reads. Knows names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from engine.batch import Float32Array
from engine.export.packing import check_finite
from engine.importers.checkpoint import Checkpoint

STACKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
)
"""Stacked matrix → its parts, in the order of their rows."""

VECTORS = ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm")


def layer_prefix(layer: int) -> str:
    return f"layers.{layer}."


def read_stack(checkpoint: Checkpoint, layer: int, stack: str) -> Float32Array:
    """[N, K] float32: the parts of a stack, one below the other.

    Raises ImportFailed for weights that are no numbers.
    """
    parts = []
    for part in STACKS[stack]:
        tensor = checkpoint.tensor(layer_prefix(layer) + part)
        parts.append(tensor.dequantize())
        check_finite(tensor, parts[-1])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_bias(checkpoint: Checkpoint, layer: int, stack: str) -> Float32Array | None:
    """[N] float32, zeros for parts without a bias; None if no part has one."""
    names = [layer_prefix(layer) + part for part in STACKS[stack]]
    if not any(f"{name}_bias" in checkpoint for name in names):
        return None
    return np.concatenate(
        [
            checkpoint.tensor(f"{name}_bias").dequantize()
            if f"{name}_bias" in checkpoint
            else np.zeros(checkpoint.tensor(name).shape[0], np.float32)
            for name in names
        ]
    )


def read_vectors(checkpoint: Checkpoint, layer: int) -> dict[str, Float32Array]:
    """The vectors that this layer has, by name."""
    prefix = layer_prefix(layer)
    return {
        name: checkpoint.tensor(prefix + name).dequantize()
        for name in VECTORS
        if prefix + name in checkpoint
    }
