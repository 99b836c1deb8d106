"""How keys and values are kept in pages: f32, int8 or int4. Bytes and scales; no storage.

Every (token, head) has scales of its own, so any slot can be rewritten alone (drafts, retries):
`f32` and `int8` one each for key and value, `int4` one per group of 32 dimensions. Keys lie
transposed, [dimension, token], values [token, dimension] (`simd.py` says why).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.errors import DoesNotFit
from engine.simd import INT4_GROUP_SIZE, LANES

BLOCK_SIZE = LANES

# Larger magnitudes count as not finite, so that no scale times a level overflows; smaller scales
# count as zero, so that none has an infinite inverse.
MAX_MAGNITUDE = np.float32(1e30)
MIN_SCALE = np.float32(1e-30)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`max_level` is the largest stored integer; 0 says that floats are stored as they are."""

    name: str
    dtype: type[np.generic]
    bits: int
    max_level: int

    def num_groups(self, head_size: int) -> int:
        """Scales per (token, head)."""
        return head_size // INT4_GROUP_SIZE if self.bits == 4 else 1

    def stored_size(self, head_size: int) -> int:
        """Elements of `dtype` per (token, head)."""
        return head_size // 2 if self.bits == 4 else head_size

    def bytes_per_token(self, num_layers: int, num_kv_heads: int, head_size: int) -> int:
        """Of keys and values and their scales, over all layers."""
        data = self.stored_size(head_size) * np.dtype(self.dtype).itemsize
        return 2 * num_layers * num_kv_heads * (data + 4 * self.num_groups(head_size))

    def check(self, head_size: int) -> None:
        """Raises DoesNotFit for a head size that the kernels cannot read in this format."""
        multiple = INT4_GROUP_SIZE if self.bits == 4 else LANES
        if head_size % multiple:
            raise DoesNotFit(
                f"KV format {self.name} needs a head size that is a multiple of {multiple}, "
                f"and this model's is {head_size}"
            )


F32 = KVFormat("f32", np.float32, 32, 0)
INT8 = KVFormat("int8", np.int8, 8, 127)
INT4 = KVFormat("int4", np.uint8, 4, 7)
KV_FORMATS = {kv_format.name: kv_format for kv_format in (F32, INT8, INT4)}
