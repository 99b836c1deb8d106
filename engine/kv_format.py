"""How keys and values are kept in pages: f32, int8, int4, or keys and values each in its own way.

Every (token, head) has scales of its own, so any slot can be rewritten alone (drafts, retries):
`f32` and `int8` one each for key and value, `int4` one per group of 32 dimensions. Keys lie
transposed, [dimension, token], values [token, dimension] (`simd.py` says why). Heads whose size
does not fill whole vectors are padded with zeros. Bytes and scales; no storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.vector_sizes import INT4_GROUP_SIZE, LANES

BLOCK_SIZE = LANES

# Larger magnitudes count as not finite, so that no scale times a level overflows; smaller scales
# count as zero, so that none has an infinite inverse.
MAX_MAGNITUDE = np.float32(1e30)
MIN_SCALE = np.float32(1e-30)


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How a head's key or value is stored. `padded_size` below is the head's size with padding.

    `max_level` is the largest stored integer; 0 says that floats are stored as they are.
    """

    dtype: type[np.generic]
    bits: int
    max_level: int

    @property
    def size_multiple(self) -> int:
        """What the kernels read at once, in elements."""
        return INT4_GROUP_SIZE if self.bits == 4 else LANES

    def num_groups(self, padded_size: int) -> int:
        """Scales per (token, head)."""
        return padded_size // INT4_GROUP_SIZE if self.bits == 4 else 1

    def stored_size(self, padded_size: int) -> int:
        """Elements of `dtype` per (token, head)."""
        return padded_size // 2 if self.bits == 4 else padded_size

    def num_bytes(self, padded_size: int) -> int:
        """Of one token's head, with its scales."""
        data = self.stored_size(padded_size) * np.dtype(self.dtype).itemsize
        return data + 4 * self.num_groups(padded_size)


@dataclass(frozen=True, slots=True)
class KVFormat:
    name: str
    keys: PageFormat
    values: PageFormat

    def padded_size(self, head_size: int) -> int:
        """The head size that fills whole vectors; what is added is zero."""
        multiple = max(self.keys.size_multiple, self.values.size_multiple)
        return -(-head_size // multiple) * multiple

    def bytes_per_token(self, num_layers: int, num_kv_heads: int, head_size: int) -> int:
        """Of keys and values and their scales, over all layers."""
        size = self.padded_size(head_size)
        return num_layers * num_kv_heads * (self.keys.num_bytes(size) + self.values.num_bytes(size))


_F32 = PageFormat(np.float32, 32, 0)
_INT8 = PageFormat(np.int8, 8, 127)
_INT4 = PageFormat(np.uint8, 4, 7)

F32 = KVFormat("f32", _F32, _F32)
INT8 = KVFormat("int8", _INT8, _INT8)
INT4 = KVFormat("int4", _INT4, _INT4)
INT8_KEYS_INT4_VALUES = KVFormat("int8k4v", _INT8, _INT4)
"""For families whose keys have a few large dimensions, which 4 bits cannot keep beside the rest."""

KV_FORMATS = {each.name: each for each in (F32, INT8, INT8_KEYS_INT4_VALUES, INT4)}
