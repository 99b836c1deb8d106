"""What each matrix of a model reads when the model reads a text, layer by layer.

Knows neither text nor quantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.batch import Float32Array, Int32Array
from engine.float_forward import Activations, FloatForward
from engine.importers.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What the stacked matrices of `layer` read, [T, K] each, and where the next layer begins.

    `following` is None after the last layer.
    """

    layer: int
    inputs: Mapping[str, Float32Array]
    following: Activations | None


def calibrate(
    checkpoint: Checkpoint,
    token_ids: Int32Array,
    num_threads: int,
    start: int = 0,
    activations: Activations | None = None,
) -> Iterator[LayerInputs]:
    """Layer by layer from `start` on; `token_ids` [S, T'] are S texts of the same length.

    `activations` are those before layer `start`; not needed when that is 0.
    """
    forward = FloatForward(checkpoint, token_ids, num_threads)
    before = activations
    for layer in range(start, checkpoint.config.num_layers):
        before = before or forward.first()
        attention = forward.attention(layer, before.qkv)
        result = forward.rest(layer, before.hidden, attention)
        inputs = {"qkv": before.qkv_inputs, "o": attention, **result.inputs}
        before = result.following
        yield LayerInputs(layer, inputs, before)
