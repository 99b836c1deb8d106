"""What a step of a model must move and compute.

From a bundle's own files, nothing measured. Weight bytes are those of the form that the CPU's
kernels read (the panels, or the packed matrices where there are none); an operation is a multiply
or an add of a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.bundle import Bundle
from engine.errors import BundleError
from engine.export.model import DecoderWeights, load_weights
from engine.export.panels import PANELS_FILE, PANELS_INDEX_FILE, read_panels_index
from engine.export.weights_file import StoredMatrix
from server.bench.kv_use import kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class ModelCost:
    """`weight_bytes`: read by every step. `layer_operations`: per token; `head_operations`: per
    token that logits are wanted of. `weight_bits`: of most of the weights. `disk_bytes`: the whole
    bundle. `attention_operations`: per token and token of its context, without windows.
    `kv_bytes_per_token`: by format."""

    weight_bytes: int
    layer_operations: int
    head_operations: int
    attention_operations: int
    weight_bits: int
    disk_bytes: int
    kv_bytes_per_token: dict[str, int]


def model_cost(bundle: Bundle) -> ModelCost:
    """Raises BundleError for an embedding model or a damaged bundle."""
    config = bundle.config
    matrices = _matrices(bundle)
    counts: dict[int, int] = {}
    for bits, num_weights, _ in matrices:
        counts[bits] = counts.get(bits, 0) + num_weights
    head = 2 * config.vocab_size * config.hidden_size
    return ModelCost(
        weight_bytes=sum(num_bytes for _, _, num_bytes in matrices),
        layer_operations=2 * sum(counts.values()) - head,
        head_operations=head,
        attention_operations=4 * config.num_layers * config.num_heads * config.head_size,
        weight_bits=max(counts, key=lambda bits: counts[bits]),
        disk_bytes=bundle.num_bytes,
        kv_bytes_per_token=kv_bytes_per_token(config),
    )


def _matrices(bundle: Bundle) -> list[tuple[int, int, int]]:
    """(bits, weights, bytes) of each matrix that a step multiplies with."""
    listed = {file.name for file in bundle.manifest.files}
    if not {PANELS_FILE, PANELS_INDEX_FILE} <= listed:
        return [_stored(matrix) for matrix in _decoder_matrices(load_weights(bundle.path))]
    try:
        index = read_panels_index(bundle.path)
    except (OSError, ValueError, TypeError) as error:
        raise bundle.damaged(f"its {PANELS_INDEX_FILE} is damaged ({error})") from error
    unread = "embed" if "lm_head" in index else None
    return [
        (panels.bits, panels.num_rows * panels.num_cols, panels.num_bytes)
        for name, panels in index.items()
        if name != unread
    ]


def _decoder_matrices(weights: DecoderWeights) -> list[StoredMatrix]:
    layers = [(layer.qkv, layer.o, layer.gate_up, layer.down) for layer in weights.layers]
    return [*(matrix for each in layers for matrix in each), weights.lm_head]


def _stored(matrix: StoredMatrix) -> tuple[int, int, int]:
    parts = (matrix.data, matrix.scales, matrix.zero_points)
    num_bytes = sum(part.num_bytes for part in parts if part is not None)
    return matrix.bits, matrix.num_rows * matrix.num_cols, num_bytes


def find_cost(bundle: Bundle) -> ModelCost | None:
    """None where the bundle's files do not tell."""
    try:
        return model_cost(bundle)
    except BundleError:
        return None
