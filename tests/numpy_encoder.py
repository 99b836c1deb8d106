"""The encoder in plain numpy and float64, one text at a time: what the graph is compared with.

Written from the papers (Vaswani et al. 2017, Devlin et al. 2018), over the published tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import erf, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def encode_one(
    tensors: Mapping[str, NDArray[Any]],
    config: Mapping[str, Any],
    token_ids: list[int],
    pooling: str = "mean",
    first_position: int = 0,
) -> Floats:
    """The embedding [hidden] of one text, of length 1."""
    weights = {name: array.astype(np.float64) for name, array in tensors.items()}
    hidden = _encoded(weights, config, token_ids, [0] * len(token_ids), first_position)
    pooled = hidden.mean(axis=0) if pooling == "mean" else hidden[0]
    unit: Floats = pooled / np.linalg.norm(pooled)
    return unit


def score_pair(
    tensors: Mapping[str, NDArray[Any]],
    config: Mapping[str, Any],
    token_ids: list[int],
    token_types: list[int],
    head: tuple[str, str],
    first_position: int = 0,
) -> float:
    """The logit of one pair; `head` names the dense layer below the tanh, and the last one."""
    weights = {
        name.removeprefix("bert.").removeprefix("roberta."): array.astype(np.float64)
        for name, array in tensors.items()
    }
    hidden = _encoded(weights, config, token_ids, token_types, first_position)
    pooled = np.tanh(_dense(weights, head[0], hidden[0]))
    return float(_dense(weights, head[1], pooled)[0])


def _encoded(
    weights: dict[str, Floats],
    config: Mapping[str, Any],
    token_ids: list[int],
    token_types: list[int],
    first_position: int,
) -> Floats:
    hidden = weights["embeddings.word_embeddings.weight"][token_ids]
    places = np.arange(len(token_ids)) + first_position
    hidden = hidden + weights["embeddings.position_embeddings.weight"][places]
    hidden = hidden + weights["embeddings.token_type_embeddings.weight"][token_types]
    hidden = _norm(weights, "embeddings.LayerNorm", hidden, config)
    for layer in range(config["num_hidden_layers"]):
        hidden = _layer(weights, f"encoder.layer.{layer}.", hidden, config)
    return hidden


def _layer(weights: dict[str, Floats], at: str, x: Floats, config: Mapping[str, Any]) -> Floats:
    num_heads = config["num_attention_heads"]

    def heads(name: str) -> Floats:
        rows = _dense(weights, f"{at}attention.self.{name}", x)
        return rows.reshape(len(x), num_heads, -1).swapaxes(0, 1)

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = query @ key.swapaxes(1, 2) / sqrt(query.shape[2])
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = (scores @ value).swapaxes(0, 1).reshape(len(x), -1)
    x = x + _dense(weights, f"{at}attention.output.dense", mixed)
    x = _norm(weights, f"{at}attention.output.LayerNorm", x, config)
    up = _activated(_dense(weights, f"{at}intermediate.dense", x), config["hidden_act"])
    return _norm(
        weights, f"{at}output.LayerNorm", x + _dense(weights, f"{at}output.dense", up), config
    )


def _dense(weights: dict[str, Floats], name: str, x: Floats) -> Floats:
    product: Floats = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return product


def _norm(weights: dict[str, Floats], name: str, x: Floats, config: Mapping[str, Any]) -> Floats:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + config["layer_norm_eps"])
    result: Floats = centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return result


def _activated(x: Floats, kind: str) -> Floats:
    if kind == "gelu":
        exact: Floats = x * (1 + np.vectorize(erf)(x / sqrt(2))) / 2
        return exact
    tanh: Floats = x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2
    return tanh
