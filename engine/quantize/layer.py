"""One decoder layer from float32 to integers, with what is known of its inputs.

Plain formats search each block's range for the least error of the weights. The activation-aware
ones move scale first (`layer_scaling.py`) and search for the least error of the outputs. Every
stack may get several forms, of which the caller keeps one. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.batch import Float32Array
from engine.export.packing import PackedMatrix, unpack
from engine.importers.checkpoint import Checkpoint
from engine.layer_tensors import STACKS, layer_prefix, read_stack, read_vectors
from engine.quantize.blocks import BlockFormat, block_grams, quantize
from engine.quantize.layer_scaling import NO_SCALING, LayerScaling, find_scaling

_ERROR_ROWS = 4096


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """`bits_per_weight` are with scales and zero points. `weight_error` and `output_error` are
    squared errors relative to the weights, and to the outputs on the calibration text. `alpha` is
    the exponent of the scaling, 0 without one."""

    stack: str
    bits: int
    block_size: int
    num_weights: int
    bits_per_weight: float
    alpha: float
    weight_error: float
    output_error: float


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    matrix: PackedMatrix
    report: MatrixReport


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """`choices`: the forms of each stacked matrix, in the order of the formats that were asked for.
    `vectors`: norms and biases that take up moved scale, by canonical part."""

    choices: Mapping[str, tuple[QuantizedMatrix, ...]]
    vectors: Mapping[str, Float32Array]


def quantize_layer(
    checkpoint: Checkpoint,
    layer: int,
    inputs: Mapping[str, Float32Array],
    formats: Sequence[BlockFormat],
    is_activation_aware: bool,
    num_threads: int,
) -> QuantizedLayer:
    """`inputs` [T, K] by stack: what the matrices read. The scaling is found for `formats[0]`.

    Raises ImportFailed for weights that are no numbers.
    """
    weights = {stack: read_stack(checkpoint, layer, stack) for stack in STACKS}
    scaling, vectors = NO_SCALING, dict[str, Float32Array]()
    if is_activation_aware:
        norms = read_vectors(checkpoint, layer)
        scaling = find_scaling(checkpoint.config, weights, inputs, norms, formats[0])
        vectors = _divided_vectors(checkpoint, layer, norms, scaling)
    choices = {}
    for stack in STACKS:
        matrix = _Scaled.of(stack, weights.pop(stack), inputs[stack], scaling)
        choices[stack] = tuple(
            matrix.quantized(block_format, is_activation_aware, num_threads)
            for block_format in formats
        )
    return QuantizedLayer(choices, vectors)


def _divided_vectors(
    checkpoint: Checkpoint, layer: int, norms: Mapping[str, Float32Array], scaling: LayerScaling
) -> dict[str, Float32Array]:
    """The norms, and the biases of `v` and `up`, that take the inverse of the moved scale."""
    vectors = {name: norms[name] / factors for name, factors in scaling.norms.items()}
    for stack, part in (("qkv", "v"), ("gate_up", "up")):
        name = f"{layer_prefix(layer)}{part}_bias"
        if name in checkpoint:
            bias = checkpoint.tensor(name).dequantize()
            vectors[f"{part}_bias"] = bias / scaling.rows[stack][-len(bias) :]
    return vectors


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A stacked matrix [N, K] with its inputs [T, K] and the scale that was moved."""

    stack: str
    weights: Float32Array
    inputs: Float32Array
    columns: Float32Array
    rows: Float32Array
    alpha: float

    @classmethod
    def of(
        cls, stack: str, weights: Float32Array, inputs: Float32Array, scaling: LayerScaling
    ) -> _Scaled:
        num_rows, num_cols = weights.shape
        columns = scaling.columns.get(stack, np.ones(num_cols, np.float32))
        rows = scaling.rows.get(stack, np.ones(num_rows, np.float32))
        return cls(stack, weights, inputs, columns, rows, scaling.alphas.get(stack, 0.0))

    def quantized(
        self, block_format: BlockFormat, by_outputs: bool, num_threads: int
    ) -> QuantizedMatrix:
        """`by_outputs`: least error of the outputs, else of the weights."""
        grams = block_grams(self.inputs / self.columns, block_format.block_size)
        scaled = self.weights * self.columns / self.rows[:, None]
        packed = quantize(scaled, block_format, grams if by_outputs else None, num_threads)
        return QuantizedMatrix(packed, self._report(packed, block_format))

    def _report(self, packed: PackedMatrix, block_format: BlockFormat) -> MatrixReport:
        weight_error, output_error = self._errors(packed)
        return MatrixReport(
            stack=self.stack,
            bits=block_format.bits,
            block_size=block_format.block_size,
            num_weights=self.weights.size,
            bits_per_weight=block_format.bits_per_weight,
            alpha=self.alpha,
            weight_error=weight_error,
            output_error=output_error,
        )

    def _errors(self, packed: PackedMatrix) -> tuple[float, float]:
        """Relative squared errors of weights and outputs, against those before any scaling."""
        sums = np.zeros((2, 2))
        for start in range(0, len(self.weights), _ERROR_ROWS):
            part = slice(start, start + _ERROR_ROWS)
            weights = self.weights[part]
            error = unpack(_rows(packed, part)) / self.columns * self.rows[part, None] - weights
            sums += [
                [_sum_squares(error), _sum_squares(weights)],
                [_sum_squares(self.inputs @ error.T), _sum_squares(self.inputs @ weights.T)],
            ]
        errors = sums[:, 0] / np.maximum(sums[:, 1], 1e-30)
        return float(errors[0]), float(errors[1])


def _rows(packed: PackedMatrix, part: slice) -> PackedMatrix:
    assert packed.scales is not None
    zeros = packed.zero_points
    return replace(
        packed,
        data=packed.data[part],
        scales=packed.scales[part],
        zero_points=None if zeros is None else zeros[part],
    )


def _sum_squares(x: Float32Array) -> float:
    flat = x.reshape(-1)
    return float(np.dot(flat, flat))
