"""Random decoders in all the forms that graphs can have, written straight into a weights file.

Two layers of a few numbers, one form after another: what an importer would have to find in a
checkpoint of a dozen architectures.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.bundle import WEIGHTS_FILE
from engine.export.graph import LayerWeights
from engine.export.model import DecoderWeights
from engine.export.weights_file import StoredArray, StoredMatrix, WeightsFile
from tests.model_configs import make_config

NUM_LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 64, 96, 160
HEADS, KV_HEADS, HEAD_SIZE = 2, 1, 32


@dataclass(frozen=True)
class Form:
    """`bits` 32 is dense. `norms` are the names of the norms that a layer has."""

    bits: int = 4
    head_bits: int = 8
    block_size: int = 32
    zero_points: bool = False
    bias: bool = False
    intermediate: int = INTERMEDIATE
    norms: tuple[str, ...] = ("attn_norm", "mlp_norm")
    query_key_norm: str = "none"
    config: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "plain": Form(),
    "int8": Form(bits=8),
    "dense": Form(bits=32, head_bits=32),
    "zero points": Form(zero_points=True, block_size=16, head_bits=4),
    "wide blocks": Form(block_size=64, intermediate=128),
    "broken last block": Form(intermediate=80),
    "bias": Form(bias=True),
    "norm of each head": Form(query_key_norm="head"),
    "norm of all heads": Form(query_key_norm="full", norms=("post_attn_norm", "post_mlp_norm")),
    "gelu, four norms": Form(
        norms=("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm"),
        config={"activation": "gelu_tanh"},
    ),
    "softcap, scales": Form(
        config={"logits_softcap": 3.0, "logits_scale": 0.5, "residual_scale": 0.3}
    ),
}


def write_weights(folder: Path, form: Form) -> tuple[ModelConfig, DecoderWeights]:
    """Into `folder / WEIGHTS_FILE`; the same numbers for the same form."""
    config = make_config(
        num_layers=NUM_LAYERS,
        head_size=HEAD_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=form.intermediate,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        query_key_norm=form.query_key_norm,
        **form.config,
    )
    with WeightsFile(folder / WEIGHTS_FILE) as file:
        writer = _Writer(file, form)
        layers = tuple(writer.layer(config, f"layers.{i}") for i in range(NUM_LAYERS))
        head = replace(form, bits=form.head_bits, bias=False)
        matrix = _Writer(file, head).matrix("lm_head", VOCABULARY, HIDDEN)
        return config, DecoderWeights(layers, writer.norm("final_norm", HIDDEN), matrix, matrix)


class _Writer:
    def __init__(self, file: WeightsFile, form: Form) -> None:
        self._file = file
        self._form = form
        self._random = np.random.default_rng(0)

    def layer(self, config: ModelConfig, name: str) -> LayerWeights:
        heads = config.num_heads * config.head_size
        each = self._form.query_key_norm == "head"
        sizes = {
            "q_norm": config.head_size if each else heads,
            "k_norm": config.head_size * (1 if each else config.num_kv_heads),
        }
        names = self._form.norms + (() if config.query_key_norm == "none" else (*sizes,))
        return LayerWeights(
            qkv=self.matrix(f"{name}.qkv", config.qkv_size, config.hidden_size),
            o=self.matrix(f"{name}.o", config.hidden_size, heads),
            gate_up=self.matrix(f"{name}.gate_up", 2 * config.intermediate_size, HIDDEN),
            down=self.matrix(f"{name}.down", HIDDEN, config.intermediate_size),
            **{norm: self.norm(f"{name}.{norm}", sizes.get(norm, HIDDEN)) for norm in names},
        )

    def norm(self, name: str, size: int) -> StoredArray:
        return self._file.append(name, self._random.uniform(0.5, 1.5, size).astype(np.float32))

    def matrix(self, name: str, num_rows: int, num_cols: int) -> StoredMatrix:
        """Values of about 1 / sqrt(K), so that the rows that come out are of about 1."""
        form = self._form
        scale = num_cols**-0.5
        bias = self._random.standard_normal(num_rows).astype(np.float32) if form.bias else None
        stored_bias = None if bias is None else self._file.append(f"{name}.bias", bias)
        if form.bits == 32:
            dense = self._random.standard_normal((num_cols, num_rows), np.float32) * scale
            data = self._file.append(f"{name}.data", dense.astype(np.float32))
            return StoredMatrix(32, num_rows, num_cols, data, None, bias=stored_bias)
        num_blocks = -(-num_cols // form.block_size)
        levels = 1 << (form.bits - 1)
        scales = self._random.uniform(0.5, 2, (num_rows, num_blocks)) * scale / levels
        block_bytes = form.block_size * form.bits // 8
        zeros = self._zeros((num_rows, -(-num_blocks * form.bits // 8)))
        return StoredMatrix(
            bits=form.bits,
            num_rows=num_rows,
            num_cols=num_cols,
            data=self._file.append(
                f"{name}.data", self._bytes((num_rows, num_blocks, block_bytes))
            ),
            scales=self._file.append(f"{name}.scales", scales.astype(np.float32)),
            block_size=form.block_size,
            zero_points=self._file.append(f"{name}.zeros", zeros) if form.zero_points else None,
            bias=stored_bias,
        )

    def _zeros(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Packed like the data; a little off the middle, as quantizers choose them."""
        if self._form.bits == 8:
            return self._random.integers(120, 136, shape, np.uint8)
        low, high = self._random.integers(6, 10, (2, *shape), np.uint8)
        packed: NDArray[np.uint8] = low | high << 4
        return packed

    def _bytes(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        return self._random.integers(0, 256, shape, np.uint8)
