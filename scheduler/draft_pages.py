"""Which tokens of which sequences a draft model's pages hold.

The draft model shares the block tables but not the history: a prefix hit, a preemption, a sequence
that was not drafted for, and drafts that did not come true all leave its pages behind or wrong.
This keeps the account, so that exactly the missing tokens are computed again. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.sequence import Sequence


@dataclass(slots=True)
class DraftPages:
    """One sequence's account: its first `num_valid` tokens are in the pages of `table`.

    `ahead`: tokens computed at `base` and behind, which were drafts then.
    """

    sequence: Sequence
    table: list[int]
    num_valid: int = 0
    num_marked_blocks: int = 0
    base: int = 0
    ahead: list[int] = field(default_factory=list)


class DraftPagesBook:
    """`block_size` in tokens. A block's digest says what its owner's keys were computed from."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pages: dict[int, DraftPages] = {}
        self._digests: dict[int, bytes] = {}

    def of(self, sequence: Sequence) -> DraftPages:
        """The account of a running sequence, brought up to date with its tokens and blocks."""
        pages = self._pages.get(sequence.number)
        if pages is None or pages.sequence is not sequence:
            self._forget_finished()
        if (
            pages is None
            or pages.sequence is not sequence
            or pages.table is not sequence.block_table
        ):
            pages = DraftPages(sequence, sequence.block_table)
            self._pages[sequence.number] = pages
            self._find_shared(pages)
        self._settle(pages)
        return pages

    def will_write(self, pages: DraftPages, end: int) -> None:
        """Tokens from `num_valid` up to `end` are about to be computed."""
        size = self._block_size
        for index in range(pages.num_valid // size, -(-end // size)):
            block_id = pages.table[index]
            if self._digests.get(block_id) != self._digest(pages, index):
                self._digests.pop(block_id, None)

    def wrote(self, pages: DraftPages, num_valid: int, ahead: list[int]) -> None:
        """The first `num_valid` tokens are there now, and behind them the drafts `ahead`."""
        pages.num_valid = pages.base = num_valid
        pages.ahead = ahead

    def _settle(self, pages: DraftPages) -> None:
        """Keep of the drafts what came true. The newest token always has to be computed."""
        tokens = pages.sequence.token_ids
        for index, token in enumerate(pages.ahead):
            at = pages.base + index
            if at >= len(tokens) or tokens[at] != token:
                break
            pages.num_valid = at + 1
        pages.ahead = []
        pages.num_valid = min(pages.num_valid, len(tokens) - 1)
        for index in range(pages.num_marked_blocks, pages.num_valid // self._block_size):
            digest = self._digest(pages, index)
            if digest is not None:
                self._digests[pages.table[index]] = digest
        pages.num_marked_blocks = max(pages.num_marked_blocks, pages.num_valid // self._block_size)

    def _find_shared(self, pages: DraftPages) -> None:
        """Blocks that another sequence's drafting has filled with the same prefix."""
        size, tokens = self._block_size, pages.sequence.token_ids
        for index, block_id in enumerate(pages.table[: (len(tokens) - 1) // size]):
            digest = self._digest(pages, index)
            if digest is None or self._digests.get(block_id) != digest:
                break
            pages.num_valid = (index + 1) * size
        pages.num_marked_blocks = pages.num_valid // size

    def _digest(self, pages: DraftPages, index: int) -> bytes | None:
        hashes = pages.sequence.block_hashes
        return hashes[index] if index < len(hashes) else None

    def _forget_finished(self) -> None:
        if len(self._pages) > 64:
            for number in [n for n, p in self._pages.items() if p.sequence.is_finished]:
                del self._pages[number]
