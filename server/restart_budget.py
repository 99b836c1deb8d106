"""How often and how soon a dead engine is started again. Arithmetic over times, no processes."""

from __future__ import annotations

from collections import deque

_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 30.0


class RestartBudget:
    """At most `max_restarts` within any `window_s` seconds; the delay doubles with each of them.

    The first restart is immediate: a lone crash should cost the clients as little as it can.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._deaths_s: deque[float] = deque()

    @property
    def num_deaths(self) -> int:
        """Deaths within the window, as of the last one."""
        return len(self._deaths_s)

    def record_death(self, now_s: float) -> float | None:
        """Return the seconds to wait before the restart, or None when the budget is used up."""
        self._deaths_s.append(now_s)
        while self._deaths_s[0] < now_s - self.window_s:
            self._deaths_s.popleft()
        if self.num_deaths > self.max_restarts:
            return None
        if self.num_deaths == 1:
            return 0.0
        return float(min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(self.num_deaths - 2, 30)))
