"""The two sizes that the kernels' code and the pages' layout share. Imports nothing."""

LANES = 16
"""Elements of a vector: one cache line of float32, and the tokens of a KV block."""

INT4_GROUP_SIZE = 32
"""Elements with a scale of their own where they are kept in 4 bits."""
