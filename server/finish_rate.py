"""The measured rate at which sequences finish, and what `Retry-After` follows from it."""

from __future__ import annotations

from collections import deque

_NUM_REMEMBERED = 64
_UNMEASURED_S = 2.0
_MIN_S = 1.0
_MAX_S = 120.0


class FinishRate:
    """Counts busy time only: an idle night must not look like a slow engine. Monotonic seconds."""

    def __init__(self) -> None:
        self._finished_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._idle_total_s = 0.0
        self._idle_since_s: float | None = None

    def become_idle(self, now_s: float) -> None:
        self._idle_since_s = now_s

    def become_busy(self, now_s: float) -> None:
        if self._idle_since_s is not None:
            self._idle_total_s += now_s - self._idle_since_s
            self._idle_since_s = None

    def record(self, now_s: float) -> None:
        self._finished_s.append(now_s - self._idle_total_s)

    def retry_after_s(self, num_places: int, now_s: float) -> float:
        """Seconds until `num_places` more sequences will have finished, from 1 to 120.

        The time since the last one counts too, so that the answer grows while nothing finishes.
        """
        if len(self._finished_s) < 2:
            return _UNMEASURED_S
        elapsed_s = now_s - self._idle_total_s - self._finished_s[0]
        per_sequence_s = elapsed_s / (len(self._finished_s) - 1)
        return min(_MAX_S, max(_MIN_S, num_places * per_sequence_s))
