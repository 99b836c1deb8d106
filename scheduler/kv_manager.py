"""Gives blocks of KV storage to sequences, shares what is already there, takes everything back.

The only code that touches ref counts. Knows token ids and blocks; not policy, not bytes.

Who owns which stretch of a running sequence's tokens:

    | shared or published      | computed, block not full | reserved            |
    0 .. num_published_blocks  .. num_computed_tokens     .. len(block_table)
      (in blocks) findable       private                    invisible garbage

Rules: a match never covers the last token (its logits are wanted); only full blocks of computed
and committed tokens are published; blocks are freed from the tail, so that a chain is evicted
from its end. A sequence that wants the logprobs of its prompt takes no hits.

**Pending digests.** A sequence that starts announces the full blocks it is going to compute. One
that waits and whose next missing block is announced by a sequence in front of it is better off to
wait than to compute it again. This cannot deadlock: it only ever waits for a running sequence of
a higher rank, and an announcement ends with the publication or with the end of the run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from scheduler.block_hash import BlockHasher
from scheduler.block_pool import BlockPool
from scheduler.sequence import Sequence, Status


class KVManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._is_sharing = enable_prefix_caching
        self._hasher = BlockHasher(block_size, secrets.token_bytes(16))
        self._pending: dict[bytes, Sequence] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest cached prefix, in order. Changes nothing."""
        if not self._takes_hits(sequence):
            return []
        limit = (len(sequence.token_ids) - 1) // self._block_size
        self._extend_hashes(sequence, limit)
        matched = []
        for digest in sequence.block_hashes[:limit]:
            block_id = self.pool.find(digest)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def pending_owner(self, sequence: Sequence, num_matched: int) -> Sequence | None:
        """The running sequence in front of this one that computes its next missing block."""
        limit = (len(sequence.token_ids) - 1) // self._block_size
        if num_matched >= limit or not self._takes_hits(sequence):
            return None
        owner = self._pending.get(sequence.block_hashes[num_matched])
        return owner if owner is not None and owner.rank < sequence.rank else None

    def attach(self, sequence: Sequence, matched: list[int]) -> None:
        """Start a run on a matched prefix and announce the blocks that will be computed."""
        assert not sequence.block_table, f"{sequence} already holds blocks"
        for block_id in matched:
            self.pool.share(block_id)
        sequence.block_table = list(matched)
        sequence.num_published_blocks = len(matched)
        sequence.num_computed_tokens = len(matched) * self._block_size
        if self._is_sharing:
            num_full = len(sequence.token_ids) // self._block_size
            self._extend_hashes(sequence, num_full)
            for digest in sequence.block_hashes[len(matched) : num_full]:
                self._pending.setdefault(digest, sequence)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens. False, with nothing done: there is none."""
        table = sequence.block_table
        num_missing = -(-num_tokens // self._block_size) - len(table)
        if num_missing <= 0:
            return True
        if num_missing > self.pool.num_free:
            return False
        for _ in range(num_missing):
            table.append(self.pool.take())
        return True

    def capacity(self, sequence: Sequence) -> int:
        """The most tokens `reserve` could grant now."""
        return (len(sequence.block_table) + self.pool.num_free) * self._block_size

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Blocks it still needs to compute the tokens that it has."""
        return max(0, self.num_blocks_for(len(sequence.token_ids)) - len(sequence.block_table))

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks of computed tokens findable; they must be committed."""
        num_full = sequence.num_computed_tokens // self._block_size
        if num_full <= sequence.num_published_blocks or not self._is_sharing:
            return
        self._extend_hashes(sequence, num_full)
        for index in range(sequence.num_published_blocks, num_full):
            digest = sequence.block_hashes[index]
            self.pool.publish(sequence.block_table[index], digest)
            self._withdraw(sequence, digest)
        sequence.num_published_blocks = num_full

    def free(self, sequence: Sequence) -> None:
        """Give everything back, also in the middle of a run. Published blocks stay findable."""
        for digest in sequence.block_hashes[sequence.num_published_blocks :]:
            self._withdraw(sequence, digest)
        for block_id in reversed(sequence.block_table):
            self.pool.release(block_id)
        sequence.block_table = []
        sequence.num_published_blocks = 0
        sequence.num_computed_tokens = 0

    def check_invariants(self, sequences: Iterable[Sequence]) -> list[str]:
        """All violations in words, given all unfinished sequences. Empty when all is well."""
        sequences = list(sequences)
        found = self.pool.violations(s.block_table for s in sequences)
        for sequence in sequences:
            found += self._sequence_violations(sequence)
        for owner in self._pending.values():
            if owner.status is not Status.RUNNING or owner not in sequences:
                found.append(f"{owner} announces blocks but does not run")
        return found

    def _sequence_violations(self, sequence: Sequence) -> list[str]:
        found = []
        table, num_computed = sequence.block_table, sequence.num_computed_tokens
        if sequence.status is Status.WAITING and table:
            found.append(f"{sequence} waits and holds {len(table)} blocks")
        if len(set(table)) != len(table):
            found.append(f"{sequence} holds a block twice: {table}")
        if num_computed > len(table) * self._block_size:
            found.append(f"{sequence} has more computed tokens than {len(table)} blocks hold")
        if sequence.num_published_blocks > num_computed // self._block_size:
            found.append(f"{sequence} has published tokens that are not computed")
        for index, block_id in enumerate(table):
            digest = self.pool.blocks[block_id].digest
            is_published = index < sequence.num_published_blocks
            if digest is not None and not (is_published and digest == sequence.block_hashes[index]):
                found.append(f"{sequence}: block {block_id} at {index} is published as another's")
        return found

    def _takes_hits(self, sequence: Sequence) -> bool:
        return self._is_sharing and sequence.prompt_logprobs is None

    def _withdraw(self, sequence: Sequence, digest: bytes) -> None:
        if self._pending.get(digest) is sequence:
            del self._pending[digest]

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        hashes = sequence.block_hashes
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else self._hasher.root(sequence.request.cache_salt)
        size = self._block_size
        for start in range(len(hashes) * size, num_blocks * size, size):
            parent = self._hasher.child(parent, sequence.token_ids[start : start + size])
            hashes.append(parent)
