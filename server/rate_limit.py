"""How much one API key may use: requests and tokens per minute, as token buckets.

A bucket holds at most one minute's worth and fills evenly. A request is let in if a whole request
is left and the tokens are not overdrawn; the tokens it really used are taken afterwards (prompt at
submission, answer at the end), which may overdraw the bucket, and then the next request waits.
So an estimate never refuses what would have fitted, and the rate holds over time.

Belongs to the event loop's thread. Knows nothing of HTTP requests; it names the header fields that
OpenAI's clients read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from server.errors import RateLimited

Clock = Callable[[], float]

_MINUTE_S = 60.0


class TokenBucket:
    """`per_minute` is both capacity and rate. `clock` is in seconds and never goes back."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated_s = clock()

    def take(self, amount: float) -> None:
        """May leave the bucket overdrawn."""
        self._level = self._now() - amount

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self._now()))

    def wait_s(self, amount: float) -> float:
        """Until `amount` is there; 0 if it is."""
        return max(0.0, amount - self._now()) / self._rate

    def reset_s(self) -> float:
        """Until the bucket is full."""
        return (self.per_minute - self._now()) / self._rate

    @property
    def _rate(self) -> float:
        return self.per_minute / _MINUTE_S

    def _now(self) -> float:
        now_s = self._clock()
        self._level += (now_s - self._updated_s) * self._rate
        self._level = min(self._level, float(self.per_minute))
        self._updated_s = now_s
        return self._level


class RateLimiter:
    """The limits of one key; None means unlimited."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        given = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._buckets = {
            kind: TokenBucket(per_minute, clock)
            for kind, per_minute in given.items()
            if per_minute is not None
        }

    def admit(self) -> None:
        """Count one request in. Raises RateLimited, and then it does not count."""
        for kind, bucket in self._buckets.items():
            # A float that was refilled by many small steps may miss the whole by an ulp.
            if (wait_s := bucket.wait_s(1.0)) > 1e-6:
                raise RateLimited(
                    f"Rate limit reached for this API key: {bucket.per_minute} {kind} per minute. "
                    f"Please try again in {duration(wait_s)}.",
                    wait_s,
                    self.headers(),
                )
        if "requests" in self._buckets:
            self._buckets["requests"].take(1.0)

    def charge_tokens(self, amount: int) -> None:
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(amount)

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-…` as OpenAI sends them; nothing for what is not limited."""
        headers: dict[str, str] = {}
        for kind, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = duration(bucket.reset_s())
        return headers


def duration(seconds: float) -> str:
    """As OpenAI writes it, rounded up: `17ms`, `1.5s`, `6m0s`."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1000:g}s"
    return f"{minutes}m{shown}" if minutes else shown
