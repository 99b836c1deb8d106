"""Small unsigned integers packed into 32-bit words, lowest bits first: one byte each again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unpack_words(words: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """[R, C] 32-bit words → [R, C * 32 / bits] values below 2 ** bits; `bits` is 2, 4 or 8."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)  # [R, 4 C]
    if bits == 8:
        return packed
    per_byte = 8 // bits
    values = np.empty((*packed.shape, per_byte), np.uint8)
    for place in range(per_byte):
        np.right_shift(packed, np.uint8(bits * place), out=values[..., place])
    values &= np.uint8((1 << bits) - 1)
    return values.reshape(len(packed), -1)
