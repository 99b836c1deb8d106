"""A linear layer's weights as a quantized checkpoint keeps them, whatever its packing was.

Groups of inputs share a scale and a zero. Mostly a group is a run of neighbours; where channels
were quantized in order of their importance ("act-order", `desc_act`) any input may be of any group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.importers.integer_blocks import IntegerBlocks

MIN_GROUP = 16
"""The narrowest block that devices know (com.microsoft.MatMulNBits)."""

WHOLE_ROW_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """weight[n, k] = (values[n, k] - zeros[n, g]) * scales[n, g] with g = group_of[k].

    `values` [N, K] uint8 below 2 ** bits, `scales` [N, G] float32, `zeros` [N, G] uint8 (up to
    2 ** bits, which some files hold), `group_of` [K].
    """

    bits: int
    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]
    group_of: NDArray[np.intp]

    def dequantize(self) -> NDArray[np.float32]:
        """[N, K] float32."""
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return (self.values.astype(np.float32) - zeros) * scales

    def blocks(self) -> IntegerBlocks | None:
        """The same in runs of inputs, exactly; None when the groups are too scattered for that."""
        size = self._run_length()
        if size is None:
            return None
        # A zero of 2 ** bits, or fewer bits than devices know, still is a plain byte.
        bits = 4 if self.bits <= 4 and int(self.zeros.max(initial=0)) < 16 else 8
        first = self.group_of[:: min(size, len(self.group_of))]
        return IntegerBlocks(bits, size, self.values, self.scales[:, first], self.zeros[:, first])

    def _run_length(self) -> int | None:
        """The widest block of 128, 64, 32 or 16 inputs in which the group never changes."""
        num_inputs = len(self.group_of)
        changes = np.flatnonzero(np.diff(self.group_of)) + 1
        for size in (WHOLE_ROW_MULTIPLE, 64, 32, MIN_GROUP):
            if not (changes % size).any():
                return size if len(changes) else -(-num_inputs // size) * size
        return None
