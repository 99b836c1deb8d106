import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import RateLimited
from server.rate_limit import RateLimiter, TokenBucket, duration


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_minutes_worth_of_requests_is_let_in_at_once_and_then_one_at_a_time() -> None:
    clock = FakeClock()
    limiter = RateLimiter(requests_per_minute=3, clock=clock)
    for _ in range(3):
        limiter.admit()
    with pytest.raises(RateLimited, match="3 requests per minute") as error:
        limiter.admit()
    assert error.value.headers["retry-after"] == "20"
    clock.now_s += 20
    limiter.admit()
    with pytest.raises(RateLimited):
        limiter.admit()


def test_a_refused_request_does_not_count() -> None:
    clock = FakeClock()
    limiter = RateLimiter(requests_per_minute=1, clock=clock)
    limiter.admit()
    for _ in range(5):
        with pytest.raises(RateLimited):
            limiter.admit()
    clock.now_s += 60
    limiter.admit()


def test_tokens_are_charged_when_they_were_used_and_debts_are_waited_for() -> None:
    clock = FakeClock()
    limiter = RateLimiter(tokens_per_minute=60, clock=clock)
    limiter.admit()
    limiter.charge_tokens(89)
    with pytest.raises(RateLimited, match="60 tokens per minute") as error:
        limiter.admit()
    assert error.value.headers["retry-after"] == "30"
    clock.now_s += 30
    limiter.admit()


def test_the_headers_are_openais() -> None:
    clock = FakeClock()
    limiter = RateLimiter(requests_per_minute=60, tokens_per_minute=600, clock=clock)
    limiter.admit()
    limiter.charge_tokens(15)
    assert limiter.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "585",
        "x-ratelimit-reset-tokens": "1.5s",
    }


def test_without_limits_everything_is_let_in_and_nothing_is_told() -> None:
    limiter = RateLimiter()
    for _ in range(1_000):
        limiter.admit()
        limiter.charge_tokens(10**9)
    assert limiter.headers() == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.017, "17ms"),
        (0.0171, "18ms"),
        (1.5, "1.5s"),
        (60, "1m0s"),
        (366.25, "6m6.25s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.integers(1, 1_000), st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=60))
def test_no_minute_lets_in_more_than_two_minutes_worth(
    per_minute: int, steps: list[tuple[float, bool]]
) -> None:
    """A full bucket and one minute's refill: the most that any minute can see."""
    clock = FakeClock()
    bucket = TokenBucket(per_minute, clock)
    taken: list[tuple[float, float]] = []
    for pause_s, is_large in steps:
        clock.now_s += pause_s
        amount = per_minute if is_large else 1
        if bucket.wait_s(amount) == 0:
            bucket.take(amount)
            taken.append((clock.now_s, amount))
        window = [a for at_s, a in taken if clock.now_s - at_s < 60]
        assert sum(window) <= 2 * per_minute + 1e-6
