import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import policy
from scheduler.policy import SchedulerConfig
from tests.fakes import make_config


def test_waiting_earns_one_class_per_aging_time_down_to_zero() -> None:
    classes = [policy.class_after_aging(2, waited_s, 10.0) for waited_s in (0, 9.9, 10, 20, 99)]
    assert classes == [2, 2, 1, 0, 0]


def test_the_next_class_is_due_at_the_next_multiple() -> None:
    assert policy.next_aging_s(0.0, 10.0) == 10.0
    assert policy.next_aging_s(12.5, 10.0) == 7.5


def test_rank_orders_by_class_then_cap_then_arrival_then_number() -> None:
    ranks = [
        policy.rank(0, False, 9.0, 9),
        policy.rank(1, True, 9.0, 8),
        policy.rank(1, False, 1.0, 2),
        policy.rank(1, False, 1.0, 3),
        policy.rank(1, False, 2.0, 1),
    ]
    assert ranks == sorted(ranks)


def test_only_a_better_class_takes_from_a_running_sequence() -> None:
    normal = policy.rank(1, False, 0.0, 0)
    assert [policy.may_take_from(priority, normal) for priority in (0, 1, 2)] == [
        True,
        False,
        False,
    ]


def test_prefills_get_the_whole_step_unless_something_decodes() -> None:
    config = make_config(
        max_num_seqs=8, max_num_batched_tokens=512, max_prefill_tokens_with_decodes=128
    )
    assert policy.prefill_budget(config, 0) == 512
    assert policy.prefill_budget(config, 4) == 128
    narrow = make_config(max_num_batched_tokens=32, max_prefill_tokens_with_decodes=30)
    assert policy.prefill_budget(narrow, 4) == 28


def test_the_first_prefill_leaves_a_quarter_to_others_if_there_are_any() -> None:
    assert policy.chunk_allowance(128, True, True) == 96
    assert policy.chunk_allowance(128, True, False) == 128
    assert policy.chunk_allowance(32, False, True) == 32
    assert policy.chunk_allowance(1, True, True) == 1


@pytest.mark.parametrize(
    ("num_decode_tokens", "chunks", "expected"),
    [
        (0, [33], [32]),
        (0, [3], [3]),
        (0, [120], [120]),
        (0, [128], [128]),
        (3, [20, 12], [20, 9]),
        (8, [2], [2]),
        (0, [200], [160]),  # the lane runs 128 and 32
        (0, [400], [392]),
        (2, [30, 2, 3], [30, 0, 0]),
    ],
)
def test_chunks_are_cut_from_the_last_to_land_on_a_near_bucket(
    num_decode_tokens: int, chunks: list[int], expected: list[int]
) -> None:
    assert policy.fill_to_bucket(num_decode_tokens, chunks, (1, 8, 32, 128)) == expected


@given(
    num_decode_tokens=st.integers(0, 40),
    chunks=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    buckets=st.sets(st.integers(1, 256)).map(sorted),
)
def test_cutting_only_shrinks_and_never_takes_the_last_prefill_token(
    num_decode_tokens: int, chunks: list[int], buckets: list[int]
) -> None:
    cut = policy.fill_to_bucket(num_decode_tokens, chunks, buckets)
    total = num_decode_tokens + sum(cut)
    assert all(0 <= new <= old for new, old in zip(cut, chunks, strict=True))
    assert sum(cut) > 0
    whole = total // buckets[-1] * buckets[-1] if buckets else 0
    assert cut == chunks or total - whole in (0, *buckets)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be positive, got 0"),
        ({"aging_s": 0.0}, "aging_s must be positive"),
        ({"max_num_batched_tokens": 4}, r"\(4\) must exceed max_num_seqs \(4\)"),
        ({"max_logits_rows": 3}, r"max_logits_rows \(3\) must be at least max_num_seqs \(4\)"),
        ({"token_buckets": (8, 1)}, "must ascend"),
    ],
)
def test_contradicting_numbers_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy.check_config(make_config(**overrides))


def test_the_defaults_of_the_configuration_hold_together() -> None:
    policy.check_config(SchedulerConfig(max_model_len=2048, num_blocks=512))
