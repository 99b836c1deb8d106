"""The blocks of the KV storage: who is used how often, which hold known content, which are free.

Ids and digests only; does not know sequences, tokens or bytes. `KVManager` is its only caller.

Eviction order, first to go first: blocks without known content (they were freed unpublished, or
never used), then the block that has been free for longest. A free block keeps its digest and
stays findable until `take` gives it away, so the prefix cache is the free list and nothing else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class Block:
    """`ref_count`: tables that hold it. `digest`: what it contains, if that was published."""

    __slots__ = ("digest", "ref_count")

    def __init__(self) -> None:
        self.ref_count = 0
        self.digest: bytes | None = None


class BlockPool:
    """`num_blocks` blocks, named 0 to num_blocks - 1. A new pool gives them away in that order."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def eviction_order(self) -> tuple[int, ...]:
        """The free blocks, the next to be taken first."""
        return tuple(self._free)

    def find(self, digest: bytes) -> int | None:
        """The block that holds this content, used or free."""
        return self._by_digest.get(digest)

    def take(self) -> int:
        """A free block for new content; it loses its old one here. KeyError if none is free."""
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        block.ref_count = 1
        if block.digest is not None:
            del self._by_digest[block.digest]
            block.digest = None
        return block_id

    def share(self, block_id: int) -> None:
        """One more table holds the block; it leaves the free list if it was in it."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self._free[block_id]
        block.ref_count += 1

    def release(self, block_id: int) -> None:
        """One table less holds the block. At 0 it joins the free list, content or none."""
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is released more often than it was taken"
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free[block_id] = None
            if block.digest is None:
                self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, digest: bytes) -> None:
        """The block's content is complete and verified. The first block of a content stays its
        home; a twin that was computed at the same time stays private."""
        if digest not in self._by_digest:
            self._by_digest[digest] = block_id
            self.blocks[block_id].digest = digest

    def num_free_after(self, released: Iterable[list[int]], kept: Iterable[int]) -> int:
        """How many blocks could be taken if these tables were released and `kept` were shared."""
        held = Counter(block_id for table in released for block_id in table)
        freed = {id_ for id_, count in held.items() if self.blocks[id_].ref_count == count}
        reused = sum(1 for id_ in kept if id_ in freed or self.blocks[id_].ref_count == 0)
        return len(self._free) + len(freed) - reused

    def violations(self, tables: Iterable[list[int]]) -> list[str]:
        """Everything that is wrong, given all the tables that exist."""
        held = Counter(block_id for table in tables for block_id in table)
        found = []
        for id_, block in enumerate(self.blocks):
            if block.ref_count != held[id_]:
                found.append(f"block {id_}: ref count {block.ref_count}, in {held[id_]} tables")
            if (block.ref_count == 0) != (id_ in self._free):
                found.append(f"block {id_}: ref count {block.ref_count}, free: {id_ in self._free}")
            if block.digest is not None and self._by_digest.get(block.digest) != id_:
                found.append(f"block {id_}: published but not findable")
        for digest, id_ in self._by_digest.items():
            if self.blocks[id_].digest != digest:
                found.append(f"block {id_}: findable under a digest that is not its own")
        return found
