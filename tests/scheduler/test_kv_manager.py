from collections.abc import Sequence as Ids

from scheduler.kv_manager import KVManager
from scheduler.sequence import Sequence, Status
from tests.fakes import make_request

BLOCK = 4


def make_kv(num_blocks: int = 8, enable_prefix_caching: bool = True) -> KVManager:
    return KVManager(num_blocks, BLOCK, enable_prefix_caching)


def make_sequence(prompt: Ids[int], number: int = 0, salt: str = "") -> Sequence:
    request = make_request(f"r{number}", prompt, cache_salt=salt)
    return Sequence(request, number, 0.0, 1000)


def run(kv: KVManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    """Start it as the scheduler does and compute its first `num_tokens` tokens (all)."""
    kv.attach(sequence, kv.match(sequence))
    sequence.status = Status.RUNNING
    compute(kv, sequence, sequence.num_tokens if num_tokens is None else num_tokens)


def compute(kv: KVManager, sequence: Sequence, num_tokens: int) -> None:
    assert kv.reserve(sequence, num_tokens)
    sequence.num_computed_tokens = num_tokens
    kv.publish(sequence)


def test_blocks_are_reserved_when_they_are_needed_and_not_before() -> None:
    kv, sequence = make_kv(), make_sequence(range(9))
    run(kv, sequence, 4)
    assert sequence.block_table == [0]
    assert kv.reserve(sequence, 5) and sequence.block_table == [0, 1]
    assert kv.reserve(sequence, 8) and sequence.block_table == [0, 1]
    assert kv.reserve(sequence, 9) and sequence.block_table == [0, 1, 2]


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    kv, sequence = make_kv(2), make_sequence(range(12))
    run(kv, sequence, 4)
    assert not kv.reserve(sequence, 12)
    assert sequence.block_table == [0]
    assert kv.pool.eviction_order == (1,)
    assert kv.capacity(sequence) == 8


def test_a_match_is_the_longest_chain_of_full_blocks() -> None:
    kv = make_kv()
    run(kv, make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], 0))
    assert kv.match(make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1)) == [0, 1]
    assert kv.match(make_sequence([1, 2, 3, 4, 5, 6, 7, 0, 9], 2)) == [0]
    assert kv.match(make_sequence([0, 2, 3, 4, 5, 6, 7, 8, 9], 3)) == []


def test_a_match_never_covers_the_last_token() -> None:
    kv = make_kv()
    run(kv, make_sequence(range(8), 0))
    assert kv.match(make_sequence(range(8), 1)) == [0]
    assert kv.match(make_sequence(range(4), 2)) == []
    assert kv.match(make_sequence(range(9), 3)) == [0, 1]


def test_only_full_blocks_of_computed_tokens_are_published() -> None:
    kv, sequence = make_kv(), make_sequence(range(12))
    run(kv, sequence, 7)
    assert kv.reserve(sequence, 12)
    assert sequence.num_published_blocks == 1
    assert kv.match(make_sequence(range(12), 1)) == [0]


def test_a_salt_separates_and_the_empty_one_shares() -> None:
    kv = make_kv()
    run(kv, make_sequence(range(5), 0, "a"))
    run(kv, make_sequence(range(5), 1))
    assert kv.match(make_sequence(range(5), 2, "a")) == [0]
    assert kv.match(make_sequence(range(5), 3, "b")) == []
    assert kv.match(make_sequence(range(5), 4)) == [2]


def test_blocks_are_freed_from_the_tail_so_the_prefix_survives_longest() -> None:
    kv, sequence = make_kv(4), make_sequence(range(14))
    run(kv, sequence)
    kv.free(sequence)
    assert kv.pool.eviction_order == (3, 2, 1, 0)
    run(kv, make_sequence(range(50, 58), 1))
    assert kv.match(make_sequence(range(14), 2)) == [0, 1]


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    kv = make_kv(4)
    old, new = make_sequence(range(8), 0), make_sequence(range(20, 28), 1)
    run(kv, old)
    run(kv, new)
    kv.free(old)
    kv.free(new)
    again = make_sequence(range(9), 2)
    kv.attach(again, kv.match(again))
    kv.free(again)
    assert kv.pool.eviction_order == (3, 2, 1, 0)


def test_a_shared_block_is_free_only_when_both_holders_have_left() -> None:
    kv = make_kv()
    first, second = make_sequence(range(6), 0), make_sequence(range(6), 1)
    run(kv, first)
    run(kv, second)
    assert (first.block_table, second.block_table) == ([0, 1], [0, 2])
    kv.free(first)
    assert kv.num_free_blocks == 6
    kv.free(second)
    assert kv.num_free_blocks == 8


def test_freeing_replaces_the_table_and_forgets_the_progress() -> None:
    kv, sequence = make_kv(), make_sequence(range(6))
    run(kv, sequence)
    table = sequence.block_table
    kv.free(sequence)
    assert sequence.block_table == [] and sequence.block_table is not table
    assert (sequence.num_computed_tokens, sequence.num_published_blocks) == (0, 0)


def test_twins_that_were_computed_at_once_are_both_right_and_one_is_findable() -> None:
    kv = make_kv()
    first, second = make_sequence(range(6), 0), make_sequence(range(6), 1)
    for sequence in (first, second):
        run(kv, sequence, 0)
    compute(kv, second, 6)
    compute(kv, first, 6)
    assert kv.match(make_sequence(range(6), 2)) == second.block_table[:1]
    assert kv.check_invariants([first, second]) == []


def test_a_follower_is_told_who_computes_its_next_block() -> None:
    kv = make_kv()
    leader, follower = make_sequence(range(9), 0), make_sequence([*range(8), 50], 1)
    run(kv, leader, 3)
    assert kv.match(follower) == []
    assert kv.pending_owner(follower, 0) is leader
    compute(kv, leader, 4)
    assert kv.match(follower) == [0]
    assert kv.pending_owner(follower, 1) is leader
    compute(kv, leader, 8)
    assert kv.match(follower) == [0, 1]
    assert kv.pending_owner(follower, 2) is None


def test_only_a_sequence_in_front_is_waited_for() -> None:
    kv = make_kv()
    behind, before = make_sequence(range(9), 1), make_sequence(range(9), 0)
    run(kv, behind, 2)
    kv.match(before)
    assert kv.pending_owner(before, 0) is None


def test_announcements_end_with_the_run() -> None:
    kv = make_kv()
    leader, follower = make_sequence(range(9), 0), make_sequence(range(9), 1)
    run(kv, leader, 3)
    kv.free(leader)
    kv.match(follower)
    assert kv.pending_owner(follower, 0) is None


def test_without_prefix_caching_nothing_is_shared_and_nobody_waits() -> None:
    kv = make_kv(enable_prefix_caching=False)
    leader, follower = make_sequence(range(9), 0), make_sequence(range(9), 1)
    run(kv, leader)
    assert kv.match(follower) == []
    assert kv.pending_owner(follower, 0) is None
    assert leader.num_published_blocks == 0


def test_a_sequence_that_wants_prompt_logprobs_takes_no_hits_but_gives_them() -> None:
    kv = make_kv()
    request = make_request("scored", range(9), prompt_logprobs=1)
    scored = Sequence(request, 0, 0.0, 1000)
    run(kv, scored)
    assert kv.match(make_sequence(range(9), 1)) == [0, 1]
    assert kv.match(Sequence(request, 2, 0.0, 1000)) == []


def test_check_invariants_returns_all_violations() -> None:
    kv, sequence = make_kv(), make_sequence(range(6))
    run(kv, sequence)
    assert kv.check_invariants([sequence]) == []
    sequence.status = Status.WAITING
    sequence.num_computed_tokens = 20
    sequence.block_table[1] = 0
    found = "\n".join(kv.check_invariants([sequence]))
    for part in (
        "block 0: ref count 1, in 2 tables",
        "block 1: ref count 1, in 0 tables",
        "waits and holds 2 blocks",
        "holds a block twice: [0, 0]",
        "more computed tokens than 2 blocks hold",
        "block 0 at 1 is published as another's",
    ):
        assert part in found
