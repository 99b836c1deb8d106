import pytest

from scheduler.block_pool import BlockPool


def taken(pool: BlockPool, count: int) -> list[int]:
    return [pool.take() for _ in range(count)]


def test_a_new_pool_gives_its_blocks_away_in_order() -> None:
    pool = BlockPool(3)
    assert taken(pool, 3) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(KeyError):
        pool.take()


def test_unpublished_blocks_go_first_then_the_one_that_is_free_for_longest() -> None:
    pool = BlockPool(4)
    taken(pool, 4)
    for block_id in (2, 0):
        pool.publish(block_id, bytes([block_id]))
    for block_id in (2, 3, 0, 1):
        pool.release(block_id)
    assert pool.eviction_order == (1, 3, 2, 0)


def test_a_free_block_stays_findable_until_it_is_taken() -> None:
    pool = BlockPool(2)
    pool.take()
    pool.publish(0, b"x")
    pool.release(0)
    assert pool.find(b"x") == 0
    assert taken(pool, 2) == [1, 0]
    assert pool.find(b"x") is None


def test_sharing_takes_a_block_out_of_the_free_list_only_once() -> None:
    pool = BlockPool(2)
    pool.take()
    pool.publish(0, b"x")
    pool.release(0)
    pool.share(0)
    pool.share(0)
    orders = [pool.eviction_order]
    for _ in range(2):
        pool.release(0)
        orders.append(pool.eviction_order)
    assert orders == [(1,), (1,), (1, 0)]


def test_the_first_block_of_a_content_stays_its_home() -> None:
    pool = BlockPool(2)
    taken(pool, 2)
    pool.publish(1, b"x")
    pool.publish(0, b"x")
    assert pool.find(b"x") == 1
    assert pool.blocks[0].digest is None


def test_num_free_after_counts_shared_blocks_only_when_all_holders_go() -> None:
    pool = BlockPool(5)
    taken(pool, 3)
    pool.share(1)
    assert pool.num_free_after([], []) == 2
    assert pool.num_free_after([[0, 1]], []) == 3
    assert pool.num_free_after([[0, 1], [1, 2]], []) == 5
    assert pool.num_free_after([[0, 1]], [0, 3]) == 1


def test_violations_lists_everything_that_is_wrong() -> None:
    pool = BlockPool(3)
    taken(pool, 2)
    assert pool.violations([[0], [1]]) == []
    pool.blocks[2].ref_count = 1
    pool.blocks[0].digest = b"x"
    assert pool.violations([[0], [0]]) == [
        "block 0: ref count 1, in 2 tables",
        "block 0: published but not findable",
        "block 1: ref count 1, in 0 tables",
        "block 2: ref count 1, in 0 tables",
        "block 2: ref count 1, free: True",
    ]


def test_releasing_a_free_block_is_a_programmer_error() -> None:
    with pytest.raises(AssertionError, match="block 0 is released more often"):
        BlockPool(1).release(0)
