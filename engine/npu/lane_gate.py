"""Whether a device may be used now: opening, open, or closed until a time after a fault.

A pure state machine; the clock's values come from outside. After each fault the device stays closed
twice as long as after the one before, up to a cap; a device that then works for `STEADY_S` starts
again with the shortest time.
"""

from __future__ import annotations

from enum import StrEnum

FIRST_BACK_OFF_S = 2.0
MAX_BACK_OFF_S = 300.0
STEADY_S = 60.0


class GateState(StrEnum):
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class LaneGate:
    """Begins closed and due at once. `reason` says why it is closed, or how it came to be open."""

    def __init__(self) -> None:
        self.state = GateState.CLOSED
        self.reason = "not opened yet"
        self.retry_at_s = float("-inf")
        self.num_faults = 0
        self._num_in_a_row = 0
        self._opened_at_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Closed, and it is time to try again."""
        return self.state is GateState.CLOSED and now_s >= self.retry_at_s

    def begin_opening(self) -> None:
        assert self.state is GateState.CLOSED, "it is closed before it is opened"
        self.state = GateState.OPENING

    def opened(self, now_s: float, reason: str) -> None:
        self.state = GateState.OPEN
        self.reason = reason
        self._opened_at_s = now_s

    def failed(self, now_s: float, reason: str) -> float:
        """Closes it. Returns for how many seconds."""
        if self.state is GateState.OPEN and now_s - self._opened_at_s >= STEADY_S:
            self._num_in_a_row = 0
        back_off_s = back_off(self._num_in_a_row + 1)
        self.close(now_s, reason, back_off_s)
        return back_off_s

    def close(self, now_s: float, reason: str, back_off_s: float) -> None:
        """Closes it for a fault that has a time of its own."""
        self.num_faults += 1
        self._num_in_a_row += 1
        self.state = GateState.CLOSED
        self.reason = reason
        self.retry_at_s = now_s + back_off_s

    def is_steady(self, now_s: float) -> bool:
        return self.state is GateState.OPEN and now_s - self._opened_at_s >= STEADY_S


def back_off(num_in_a_row: int) -> float:
    """Seconds to stay closed after that many faults in a row, which is at least 1."""
    return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(num_in_a_row - 1, 30))
