"""Prompts and arrivals are the same for the same seed, on every machine."""

from __future__ import annotations

import pytest

from server.bench.workloads import (
    TokenRange,
    burst_arrivals,
    chat_turns,
    common_prefix_batch,
    lengths_up_to,
    poisson_arrivals,
    stream_of,
    words_of,
)

TOKENS = TokenRange(100, 110)
EXPECTED_PROMPT = (103, 108, 107, 106, 101, 103, 103, 103)


def test_a_seed_and_a_name_give_exactly_these_tokens() -> None:
    assert TOKENS.prompt(stream_of(1, "prefill", 512), 8) == EXPECTED_PROMPT
    assert TOKENS.prompt(stream_of(2, "prefill", 512), 8) != EXPECTED_PROMPT
    assert TOKENS.prompt(stream_of(1, "decode", 512), 8) != EXPECTED_PROMPT


def test_poisson_arrivals_begin_at_once_and_keep_the_rate() -> None:
    times = poisson_arrivals(stream_of(3), 4.0, 4_000)
    assert times[0] == 0.0
    assert list(times) == sorted(times)
    assert times[-1] == pytest.approx(1_000, rel=0.05)
    assert poisson_arrivals(stream_of(3), 4.0, 3) == times[:3]


def test_bursts_have_the_same_mean_rate() -> None:
    assert burst_arrivals(2.0, 6, 4) == (0.0, 0.0, 0.0, 0.0, 2.0, 2.0)


def test_each_turn_of_a_chat_begins_with_the_one_before() -> None:
    turns = chat_turns(TOKENS, stream_of(1), system=5, user=2, reply=3, turns=3)
    assert [len(turn) for turn in turns] == [7, 12, 17]
    assert turns[1][:7] == turns[0]
    assert turns[2][:12] == turns[1]


def test_a_batch_shares_its_prefix_and_nothing_else() -> None:
    batch = common_prefix_batch(TokenRange(), stream_of(1), prefix=50, own=10, count=4)
    assert len({prompt[:50] for prompt in batch}) == 1
    assert len({prompt[50] for prompt in batch}) == 4


def test_words_keep_shared_prefixes_and_their_number() -> None:
    assert len(words_of((5, 6, 7), 2.0).split()) == 6
    assert words_of((5, 6, 7)).startswith(words_of((5, 6)))
    assert words_of((5,)) != words_of((6,))


def test_lengths_leave_room_for_the_answer() -> None:
    assert lengths_up_to(512, (128, 496, 512), 16) == (128, 496)
