"""Which texts make a batch, when, and that nobody waits for long."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.embedding_queue import BatchPolicy, EmbeddingQueue, QueuedText
from scheduler.messages import EmbedRequest

POLICY = BatchPolicy(window_s=0.005, max_batch=4, max_length_difference=3, max_batch_tokens=40)


def request(name: str, *lengths: int) -> EmbedRequest:
    return EmbedRequest(name, tuple((7,) * length for length in lengths))


def queue_of(*requests: EmbedRequest, policy: BatchPolicy = POLICY) -> EmbeddingQueue:
    queue = EmbeddingQueue(policy)
    for number, one in enumerate(requests):
        queue.add(one, float(number))
    return queue


def shown(batch: list[QueuedText]) -> list[tuple[str, int]]:
    return [(text.request_id, text.index) for text in batch]


def test_the_first_text_waits_for_the_window_and_later_ones_do_not_move_it() -> None:
    queue = EmbeddingQueue(POLICY)
    assert queue.wait_s(0.0) is None
    queue.add(request("a", 3), 0.0)
    assert queue.wait_s(0.0) == 0.005
    queue.add(request("b", 3), 0.004)
    assert queue.wait_s(0.004) == 0.005 - 0.004
    assert queue.wait_s(0.005) == queue.wait_s(9.0) == 0.0
    assert shown(queue.take_batch()) == [("a", 0), ("b", 0)]
    assert queue.wait_s(9.0) is None


def test_a_full_batch_does_not_wait() -> None:
    queue = EmbeddingQueue(POLICY)
    queue.add(request("a", 3, 3, 3), 0.0)
    assert queue.wait_s(0.0) == 0.005
    queue.add(request("b", 9), 0.0)
    assert queue.wait_s(0.0) == 0.0


def test_lengths_in_a_batch_differ_by_no_more_than_the_bound() -> None:
    queue = queue_of(request("a", 2, 9, 5, 8, 6))
    assert shown(queue.take_batch()) == [("a", 1), ("a", 3), ("a", 4)]  # 9, 8, 6; 5 is too short
    assert shown(queue.take_batch()) == [("a", 2), ("a", 0)]


def test_a_batch_has_no_more_tokens_than_the_bound_padding_included() -> None:
    queue = queue_of(request("a", 15, 15, 12))
    assert shown(queue.take_batch()) == [("a", 1), ("a", 0)]  # three texts of 15 would be 45
    assert shown(queue.take_batch()) == [("a", 2)]


def test_a_text_longer_than_the_bound_is_a_batch_of_its_own() -> None:
    queue = queue_of(request("a", 50, 49))
    assert [len(queue.take_batch()), len(queue.take_batch())] == [1, 1]


def test_small_requests_ride_with_a_large_one_and_then_go_first() -> None:
    queue = queue_of(request("large", *[5] * 9), request("b", 6), request("c", 20))
    assert shown(queue.take_batch())[:2] == [("large", 8), ("b", 0)]
    assert shown(queue.take_batch()) == [("c", 0)]  # its length fits nobody else's: now its turn
    assert {name for name, _ in shown(queue.take_batch())} == {"large"}


def test_who_arrives_while_a_batch_runs_goes_before_the_next_batch_of_the_same_request() -> None:
    queue = queue_of(request("large", *[30] * 9))
    assert shown(queue.take_batch()) == [("large", 8)]
    queue.add(request("b", 5), 1.0)
    assert shown(queue.take_batch()) == [("b", 0)]
    assert shown(queue.take_batch()) == [("large", 7)]


def test_seats_are_given_in_rounds() -> None:
    queue = queue_of(request("a", 5, 5, 5, 5), request("b", 5, 5, 5), request("c", 5))
    assert [name for name, _ in shown(queue.take_batch())] == ["a", "b", "c", "a"]


def test_an_aborted_request_gives_its_seats_back() -> None:
    queue = queue_of(request("a", 5, 5), request("b", 5))
    queue.abort("a")
    queue.abort("unknown")
    assert (queue.num_texts, shown(queue.take_batch())) == (1, [("b", 0)])


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(LENGTHS, min_size=1, max_size=6),
    max_batch=st.integers(1, 8),
    difference=st.integers(0, 20),
)
def test_every_text_is_computed_once_in_batches_within_the_bounds(
    requests: list[list[int]], max_batch: int, difference: int
) -> None:
    policy = BatchPolicy(0.0, max_batch, difference, 100)
    queue = queue_of(*(request(str(i), *r) for i, r in enumerate(requests)), policy=policy)
    seen: list[tuple[str, int]] = []
    while queue.num_texts:
        batch = queue.take_batch()
        lengths = [len(text.token_ids) for text in batch]
        assert len(batch) <= max_batch
        assert max(lengths) - min(lengths) <= difference
        assert len(batch) == 1 or len(batch) * max(lengths) <= 100
        seen += shown(batch)
    assert sorted(seen) == sorted(
        (str(i), j) for i, r in enumerate(requests) for j in range(len(r))
    )
    assert queue.wait_s(0.0) is None


@given(others=st.integers(1, 8))
def test_a_request_waits_for_one_batch_of_each_before_it_at_most(others: int) -> None:
    large = [request(str(i), *[30 + 5 * i] * 50) for i in range(others)]
    queue = queue_of(*large, request("last", 1))
    batches = [shown(queue.take_batch()) for _ in range(others + 1)]
    assert ("last", 0) in batches[-1]
