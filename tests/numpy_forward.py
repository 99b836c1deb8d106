"""The oracle: a Llama decoder in plain numpy and float32, straight from a checkpoint's tensors.

No packing, no int8 activations, no pages, no batches: one sequence, the textbook formulas
(Touvron et al. 2023). Whatever the engine does differently is a difference to these logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.importers.checkpoint import Checkpoint

Float32Array = NDArray[np.float32]


def numpy_forward(checkpoint: Checkpoint, token_ids: Sequence[int]) -> Float32Array:
    """Logits [T, V] of every token. Weights are dequantized one at a time."""
    config = checkpoint.config

    def weight(name: str) -> Float32Array:
        return checkpoint.tensor(name).dequantize()

    embedding = weight("embed")
    hidden: Float32Array = embedding[list(token_ids)]
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        normed = rms_norm(hidden, weight(prefix + "attn_norm"), config.rms_norm_eps)
        q, k, v = (normed @ weight(prefix + name).T for name in "qkv")
        hidden = hidden + causal_attention(config, q, k, v) @ weight(prefix + "o").T
        normed = rms_norm(hidden, weight(prefix + "mlp_norm"), config.rms_norm_eps)
        gated: Float32Array = silu(normed @ weight(prefix + "gate").T) * (
            normed @ weight(prefix + "up").T
        )
        hidden = hidden + gated @ weight(prefix + "down").T
    normed = rms_norm(hidden, weight("final_norm"), config.rms_norm_eps)
    head = embedding if config.tied_embeddings else weight("lm_head")
    logits: Float32Array = normed @ head.T
    return logits


def rms_norm(x: Float32Array, weight: Float32Array, epsilon: float) -> Float32Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed = x / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return np.asarray(normed, np.float32)


def silu(x: Float32Array) -> Float32Array:
    return np.asarray(x / (np.float32(1) + np.exp(-x)), np.float32)


def rotate(x: Float32Array, frequencies: NDArray[np.float64]) -> Float32Array:
    """RoPE of [T, heads, D] at positions 0..T-1, in the half-split form."""
    angles = np.arange(len(x))[:, None, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_attention(
    config: ModelConfig, q: Float32Array, k: Float32Array, v: Float32Array
) -> Float32Array:
    """[T, heads * D] of queries, keys and values [T, …], each KV head serving a group of heads."""
    num_tokens, group = len(q), config.num_heads // config.num_kv_heads
    frequencies = np.array(config.ropes[0].frequencies)
    queries = rotate(q.reshape(num_tokens, -1, config.head_size), frequencies)
    keys = rotate(k.reshape(num_tokens, -1, config.head_size), frequencies)
    values = v.reshape(num_tokens, -1, config.head_size)
    visible = np.tril(np.ones((num_tokens, num_tokens), bool))
    out = np.empty_like(queries)
    for head in range(config.num_heads):
        scores = queries[:, head] @ keys[:, head // group].T / np.float32(config.head_size**0.5)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:, head] = weights @ values[:, head // group]
    return out.reshape(num_tokens, -1)
