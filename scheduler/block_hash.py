"""The name of a full block of keys and values: a keyed 128-bit digest of all that made it.

A block's content is a function of every token up to its end, so its digest is chained over the
parent's. Fields cannot run into each other: the salt is hashed alone, in a domain of its own, and
all other fields have a fixed width. The pool belongs to one model, one device and one KV format
in one process, and the key is drawn anew for each pool, so none of those need to be in the digest.
Python's `hash` is not used: 64 bits that an attacker can aim at are not an identity.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

DIGEST_BYTES = 16


class BlockHasher:
    """Digests of blocks of `block_size` token ids under one secret `key` (at most 64 bytes)."""

    def __init__(self, block_size: int, key: bytes) -> None:
        self._pack = struct.Struct(f"<{block_size}I").pack
        self._root_state = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"hexlm kv salt")
        self._block_state = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"hexlm kv block")

    def root(self, salt: str) -> bytes:
        """The parent of a first block. Equal salts share, different ones never meet."""
        state = self._root_state.copy()
        state.update(salt.encode("utf-8", "surrogatepass"))
        return state.digest()

    def child(self, parent: bytes, token_ids: list[int]) -> bytes:
        """The digest of the block of exactly `block_size` tokens that follows `parent`."""
        state = self._block_state.copy()
        state.update(parent + self._pack(*token_ids))
        return state.digest()
