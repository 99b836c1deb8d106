"""The sizes that the kernels' code and the pages' layout share. Imports nothing."""

LANES = 16
"""Elements of a vector: one cache line of float32, and the tokens of a KV block."""

INT4_GROUP_SIZE = 32
"""Elements with a scale of their own where they are kept in 4 bits."""

TILE_KEYS = 8 * LANES
"""Keys that attention works on at a time."""

SPAN_KEYS = 4 * TILE_KEYS
"""The keys of a query are summed up span by span, and the spans' results merged in order."""
