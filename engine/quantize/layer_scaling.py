"""Where a decoder layer's scale may be moved, and where it should be.

The inputs of a matrix can be scaled for free when something before it takes the inverse: the
norm in front of `qkv` and `gate_up`, the rows of `v` for `o`, the rows of `up` for `down` (Lin et
al. 2023; here `v` serves its whole group of query heads, whose factors are therefore equal). After
a norm that is not there (norms only behind attention and MLP) nothing is moved.
Knows arrays and the numbers of a model; no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.architectures.config import ModelConfig
from engine.batch import Float32Array
from engine.quantize.blocks import BlockFormat, plain_values
from engine.quantize.scaling import Scaling, search_scaling

MAX_SEARCH_TOKENS = 512
MAX_SEARCH_ROWS = 4096
"""The search looks at so many tokens and rows, evenly chosen."""

NORM_BEFORE = {"qkv": "attn_norm", "gate_up": "mlp_norm"}


@dataclass(frozen=True, slots=True)
class LayerScaling:
    """`weight[n, k] * columns[k] / rows[n]` is what is quantized, by stack.

    `norms`: what the norm vectors are divided by. `alphas`: the exponents that were found.
    """

    columns: Mapping[str, Float32Array]
    rows: Mapping[str, Float32Array]
    norms: Mapping[str, Float32Array]
    alphas: Mapping[str, float]


NO_SCALING = LayerScaling({}, {}, {}, {})


def find_scaling(
    config: ModelConfig,
    weights: Mapping[str, Float32Array],
    inputs: Mapping[str, Float32Array],
    norms: Mapping[str, Float32Array],
    block_format: BlockFormat,
) -> LayerScaling:
    """`weights` [N, K] and `inputs` [T, K] are by stack; `norms` are the vectors of the layer."""
    found = {
        stack: _search(
            weights[stack], inputs[stack], _magnitudes(config, stack, inputs), block_format
        )
        for stack in weights
        if stack not in NORM_BEFORE or NORM_BEFORE[stack] in norms
    }
    columns = {stack: scaling.factors for stack, scaling in found.items()}
    rows = {"qkv": np.ones(len(weights["qkv"]), np.float32)}
    rows["gate_up"] = np.ones(len(weights["gate_up"]), np.float32)
    by_value = columns["o"].reshape(config.num_kv_heads, -1, config.head_size)[:, 0].reshape(-1)
    rows["qkv"][-len(by_value) :] = by_value
    rows["gate_up"][-len(columns["down"]) :] = columns["down"]
    return LayerScaling(
        columns,
        rows,
        norms={norm: columns[stack] for stack, norm in NORM_BEFORE.items() if stack in columns},
        alphas={stack: scaling.alpha for stack, scaling in found.items()},
    )


def _magnitudes(
    config: ModelConfig, stack: str, inputs: Mapping[str, Float32Array]
) -> Float32Array:
    """[K]: mean |x|, over the query heads that share a value as well for `o`."""
    mean: Float32Array = np.abs(inputs[stack]).mean(axis=0)
    if stack != "o":
        return mean
    heads = mean.reshape(config.num_kv_heads, -1, config.head_size)
    return np.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)


def _search(
    weights: Float32Array, inputs: Float32Array, magnitudes: Float32Array, block_format: BlockFormat
) -> Scaling:
    tokens = inputs[:: -(-len(inputs) // MAX_SEARCH_TOKENS)]
    rows = weights[:: -(-len(weights) // MAX_SEARCH_ROWS)]
    return search_scaling(
        [rows], tokens, magnitudes, lambda matrix: plain_values(matrix, block_format)
    )
