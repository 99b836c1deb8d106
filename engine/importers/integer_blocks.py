"""Weights that a file keeps as small integers with a scale and a zero for every group of inputs.

The one form that all exact integer storages have on their way to a device: ggml's Q4_0 and Q8_0,
AWQ, GPTQ, compressed-tensors. Knows none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class IntegerBlocks:
    """weight[n, k] = (values[n, k] - zeros[n, k // group_size]) * scales[n, k // group_size].

    `values` [N, K] uint8 below 2 ** bits, `scales` [N, groups] float32, `zeros` [N, groups] uint8;
    `bits` is 4 or 8. The last group may be cut off: groups = ceil(K / group_size).
    """

    bits: int
    group_size: int
    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]

    def dequantize(self) -> NDArray[np.float32]:
        """[N, K] float32."""
        num_cols = self.values.shape[1]
        scales = np.repeat(self.scales, self.group_size, axis=1)[:, :num_cols]
        zeros = np.repeat(self.zeros, self.group_size, axis=1)[:, :num_cols]
        return (self.values.astype(np.float32) - zeros) * scales
