"""How keys and values are kept in pages: f32, int8, int4, or keys and values each in its own way.

Every (token, head) has scales of its own, so any slot can be rewritten alone (drafts, retries):
`f32` and `int8` one each for key and value, `int4` one per group of 32 dimensions. A block of 16
tokens lies as the kernels read it, one head after another, in vectors of 16 lanes:

- keys [D / 4, token, 4]: a lane is four dimensions of one token;
- values [D / 16, token / 4, 16 dimensions, 4 tokens]: a lane is one dimension of four tokens;
- `f32` has a lane per element: keys [D, token, 1], values [1, token, D, 1].

With 4 bits D counts pairs: dimension i of a group of 32 in the low half of a byte, i + 16 in the
high one. Keys have 128 or 8 added, since the dot product wants one of two operands unsigned; values
of 4 bits are two's complement. Heads whose size does not fill whole vectors are padded with zeros.
Bytes and scales; no storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.vector_sizes import INT4_GROUP_SIZE, LANES

BLOCK_SIZE = LANES
LANE_ELEMENTS = 4
"""Bytes that a dot product takes from one lane."""

# Larger magnitudes count as not finite, so that no scale times a level overflows; smaller scales
# count as zero, so that none has an infinite inverse.
MAX_MAGNITUDE = np.float32(1e30)
MIN_SCALE = np.float32(1e-30)


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How a head's key or value is stored. `padded_size` below is the head's size with padding.

    `max_level` is the largest integer; 0 says that floats are stored as they are. `bias` is what
    is added to an integer before it is stored.
    """

    dtype: type[np.generic]
    bits: int
    max_level: int
    bias: int

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

    def key_shape(self, padded_size: int) -> tuple[int, int, int]:
        """Of a block's keys: [elements, 16 tokens, elements of a lane]."""
        lane = 1 if self.max_level == 0 else LANE_ELEMENTS
        return self.stored_size(padded_size) // lane, BLOCK_SIZE, lane

    def value_shape(self, padded_size: int) -> tuple[int, int, int, int]:
        """Of a block's values: [elements, tokens, elements, tokens of a lane]."""
        size = self.stored_size(padded_size)
        if self.max_level == 0:
            return 1, BLOCK_SIZE, size, 1
        return size // LANES, BLOCK_SIZE // LANE_ELEMENTS, LANES, LANE_ELEMENTS

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


_F32 = PageFormat(np.float32, 32, 0, bias=0)
_INT8_KEYS = PageFormat(np.uint8, 8, 127, bias=128)
_INT8_VALUES = PageFormat(np.int8, 8, 127, bias=0)
_INT4_KEYS = PageFormat(np.uint8, 4, 7, bias=8)
_INT4_VALUES = PageFormat(np.uint8, 4, 7, bias=0)

F32 = KVFormat("f32", _F32, _F32)
INT8 = KVFormat("int8", _INT8_KEYS, _INT8_VALUES)
INT4 = KVFormat("int4", _INT4_KEYS, _INT4_VALUES)
INT8_KEYS_INT4_VALUES = KVFormat("int8k4v", _INT8_KEYS, _INT4_VALUES)
"""For families whose keys have a few large dimensions, which 4 bits cannot keep beside the rest."""

KV_FORMATS = {each.name: each for each in (F32, INT8, INT8_KEYS_INT4_VALUES, INT4)}
