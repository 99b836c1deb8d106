"""Tells from the weights of a bundle what each KV format would do to its keys, and writes it down.

The arithmetic is `key_noise.py`'s; what follows from it, `kv_guard.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.architectures.config import ModelConfig
from engine.batch import Float32Array
from engine.bundle import WEIGHTS_FILE
from engine.export.graph import LayerWeights
from engine.export.packing import PackedMatrix, unpack
from engine.export.weights_file import StoredArray, StoredMatrix, map_array
from engine.key_noise import HeadSizes, head_sizes, normed_sizes, worst_noise
from engine.kv_guard import KV_NOISE_FILE


def write_kv_noise(config: ModelConfig, layers: Sequence[LayerWeights], folder: Path) -> str:
    """Looks at the weights that lie in `folder` and returns the name of the file written."""
    weights_path = folder / WEIGHTS_FILE
    noise = worst_noise(config, [_sizes(config, weights_path, layer) for layer in layers])
    (folder / KV_NOISE_FILE).write_text(json.dumps(noise), "utf-8")
    return KV_NOISE_FILE


def _sizes(
    config: ModelConfig, weights_path: Path, layer: LayerWeights
) -> tuple[HeadSizes, HeadSizes]:
    """Of queries and keys."""

    def vector(stored: StoredArray) -> Float32Array:
        return np.asarray(map_array(weights_path, stored), np.float32)

    if layer.q_norm is not None and layer.k_norm is not None:
        return (
            normed_sizes(vector(layer.q_norm), config.num_heads, config.head_size),
            normed_sizes(vector(layer.k_norm), config.num_kv_heads, config.head_size),
        )
    # Without a norm in front the inputs' sizes are not known; one is what training aims at.
    one = np.ones(config.hidden_size, np.float32)
    inputs = one if layer.attn_norm is None else vector(layer.attn_norm)
    bias = None if layer.qkv.bias is None else vector(layer.qkv.bias)

    def sizes(start: int, num_heads: int) -> HeadSizes:
        rows = slice(start, start + num_heads * config.head_size)
        weights = read_rows(weights_path, layer.qkv, rows)
        return head_sizes(weights, None if bias is None else bias[rows], inputs, config.head_size)

    num_queries = config.num_heads * config.head_size
    return sizes(0, config.num_heads), sizes(num_queries, config.num_kv_heads)


def read_rows(weights_path: Path, matrix: StoredMatrix, rows: slice) -> Float32Array:
    """Some rows of a stored matrix, dequantized."""
    data = np.asarray(map_array(weights_path, matrix.data))
    if matrix.scales is None:
        return np.ascontiguousarray(data[:, rows].T, np.float32)
    zeros = None
    if matrix.zero_points is not None:
        zeros = np.asarray(map_array(weights_path, matrix.zero_points), np.uint8)[rows]
    return unpack(
        PackedMatrix(
            bits=matrix.bits,
            data=np.asarray(data[rows], np.uint8),
            scales=np.asarray(map_array(weights_path, matrix.scales), np.float32)[rows],
            block_size=matrix.block_size,
            zero_points=zeros,
            columns=matrix.num_cols,
        )
    )
