from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.response_log import ResponseLog
from server.response_store import ResponseStore


def response(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": text}]}


def kept(store: ResponseStore, count: int) -> list[int]:
    """Which of the first `count` responses are still there; looking does not touch the order."""
    return [i for i in range(count) if store.find_item("", f"msg_{i}") is not None]


def test_what_was_not_used_for_longest_goes_first() -> None:
    store = ResponseStore(max_responses=2, max_bytes=10**6)
    store.put("", response(0), [])
    store.put("", response(1), [])
    assert store.get("", "resp_0") is not None
    store.put("", response(2), [])
    assert kept(store, 3) == [0, 2]
    assert store.get("", "resp_1") is None


def test_bytes_are_bounded_too() -> None:
    store = ResponseStore(max_responses=100, max_bytes=10_000)
    for i in range(10):
        store.put("", response(i, "x" * 2_000), [])
    assert kept(store, 10) == [7, 8, 9]
    assert store.num_bytes <= 10_000


def test_what_is_larger_than_the_store_is_not_kept_and_evicts_nothing() -> None:
    store = ResponseStore(max_responses=100, max_bytes=5_000)
    store.put("", response(0), [])
    store.put("", response(1, "x" * 5_000), [])
    assert kept(store, 2) == [0]


def test_a_response_in_progress_stays_until_it_has_ended() -> None:
    store = ResponseStore(max_responses=1, max_bytes=10**6)
    store.put("", response(0), [], in_progress=True)
    store.put("", response(1), [])
    assert kept(store, 2) == [0]
    store.put("", response(0, "done"), [])
    store.put("", response(2), [])
    assert kept(store, 3) == [2]


def test_scopes_see_only_their_own() -> None:
    store = ResponseStore(max_responses=9, max_bytes=10**6)
    store.put("a", response(0), [])
    assert store.get("b", "resp_0") is None
    assert store.find_item("b", "msg_0") is None
    assert not store.delete("b", "resp_0")
    assert store.delete("a", "resp_0")
    assert (len(store), store.num_bytes) == (0, 0)


def test_the_conversation_is_the_input_and_the_output() -> None:
    store = ResponseStore(max_responses=9, max_bytes=10**6)
    store.put("", response(0, "b"), [{"id": "msg_a"}])
    stored = store.get("", "resp_0")
    assert stored is not None
    assert [item["id"] for item in stored.conversation()] == ["msg_a", "msg_0"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3_000), st.booleans()), max_size=40))
def test_the_bounds_hold_after_every_step(steps: list[tuple[int, int, bool]]) -> None:
    store = ResponseStore(max_responses=3, max_bytes=8_000)
    for number, size, deletes in steps:
        if deletes:
            store.delete("", f"resp_{number}")
        else:
            store.put("", response(number, "x" * size), [])
        assert len(store) == len(kept(store, 6)) <= 3
        assert 0 <= store.num_bytes <= 8_000


def test_the_events_of_a_response_stay_with_it_and_are_counted() -> None:
    store, log = ResponseStore(10, 100_000), ResponseLog()
    store.put("a", response(1), [], in_progress=True, log=log)
    empty = store.num_bytes
    log.append([b"x" * 5_000])
    store.put("a", response(1), [])
    stored = store.get("a", response(1)["id"])
    assert stored is not None and stored.log is log
    assert store.num_bytes == empty + 5_000
    assert store.delete("a", response(1)["id"])
    assert store.num_bytes == 0
