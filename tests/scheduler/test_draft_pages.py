"""What a draft model's pages hold of a sequence, through drafts, hits and preemption."""

from __future__ import annotations

from scheduler.draft_pages import DraftPagesBook
from scheduler.sequence import Sequence
from tests.fakes import make_request

SIZE = 4


def running(tokens: list[int], table: list[int], number: int = 0) -> Sequence:
    """Full blocks have digests that tell their contents, as the KV manager makes them."""
    sequence = Sequence(make_request(f"r{number}", tokens, 40), number, 0.0, 200)
    sequence.block_table = table
    set_digests(sequence)
    return sequence


def set_digests(sequence: Sequence) -> None:
    for end in range(SIZE * (len(sequence.block_hashes) + 1), sequence.num_tokens + 1, SIZE):
        sequence.block_hashes.append(bytes(sequence.token_ids[:end]))


def fill(book: DraftPagesBook, sequence: Sequence, ahead: list[int] | None = None) -> None:
    pages = book.of(sequence)
    book.will_write(pages, sequence.num_tokens + len(ahead or []))
    book.wrote(pages, sequence.num_tokens, ahead or [])


def test_a_new_sequence_has_nothing() -> None:
    assert DraftPagesBook(SIZE).of(running([1, 2, 3], [0])).num_valid == 0


def test_the_newest_token_always_has_to_be_computed() -> None:
    book, sequence = DraftPagesBook(SIZE), running([1, 2, 3], [0])
    fill(book, sequence)
    assert book.of(sequence).num_valid == 2
    sequence.token_ids.append(4)
    assert book.of(sequence).num_valid == 2  # only what `of` has cut off before


def test_drafts_that_came_true_need_not_be_computed_again() -> None:
    book, sequence = DraftPagesBook(SIZE), running([1, 2, 3], [0, 1, 2])
    fill(book, sequence, [10, 11, 12])
    sequence.token_ids += [10, 11, 99]
    assert book.of(sequence).num_valid == 5
    assert book.of(sequence).num_valid == 5


def test_drafts_that_did_not_come_true_count_for_nothing() -> None:
    book, sequence = DraftPagesBook(SIZE), running([1, 2, 3], [0, 1, 2])
    fill(book, sequence, [10, 11])
    sequence.token_ids.append(99)
    assert book.of(sequence).num_valid == 3


def test_a_preempted_sequence_starts_from_the_blocks_that_it_gets_back() -> None:
    book, sequence = DraftPagesBook(SIZE), running([*range(9)], [3, 4, 5])
    fill(book, sequence)
    book.of(sequence)
    sequence.block_table = [3, 7, 8]
    assert book.of(sequence).num_valid == 4
    sequence.block_table = [6, 7, 8]
    assert book.of(sequence).num_valid == 0


def test_a_shared_prefix_is_there_if_it_was_drafted_with() -> None:
    book, first = DraftPagesBook(SIZE), running([*range(10)], [3, 4, 5])
    fill(book, first)
    book.of(first)
    second = running([*range(8), 50, 51], [3, 4, 9], number=1)
    assert book.of(second).num_valid == 8
    other = running([40, *range(1, 10)], [3, 4, 9], number=2)
    assert book.of(other).num_valid == 0


def test_a_block_written_by_another_is_not_mistaken_for_the_old_one() -> None:
    book, first = DraftPagesBook(SIZE), running([*range(10)], [3, 4, 5])
    fill(book, first)
    book.of(first)
    thief = running([60, 61], [4], number=1)
    pages = book.of(thief)
    book.will_write(pages, 2)
    again = running([*range(10)], [3, 4, 5], number=2)
    assert book.of(again).num_valid == 4


def test_a_new_sequence_with_an_old_number_starts_anew() -> None:
    book, table = DraftPagesBook(SIZE), [3, 4, 5]
    fill(book, running([*range(10)], table))
    assert book.of(running([*range(50, 60)], table)).num_valid == 0
