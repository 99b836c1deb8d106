"""How many threads work on a step: all that there are, or one while others want the cores.

Threads that meet 300 times a step wait for each other whenever one of them loses its core, and on
a busy machine that costs more than the others bring. Any number of threads computes the same bits,
so the choice is free at every step. Pure: told the times, it decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HIGH_WAIT = 0.4
"""The share of a step that threads wait for each other: from here on, one thread is tried."""

MIN_GAIN = 0.9
"""The other size is taken when a step takes at most so much of the time."""

FIRST_PAUSE, LONGEST_PAUSE = 8, 512
"""Steps between two tries of the other size; twice as many after every try in vain."""

_NEW_WEIGHT = 0.25
_CLASSES = (1, 4, 16, 64)


@dataclass(slots=True)
class _Class:
    """Steps of about as many tokens."""

    is_alone: bool = False
    seconds: float = 0.0
    wait: float = 0.0
    num_steps: int = 0
    until_try: int = FIRST_PAUSE
    pause: int = FIRST_PAUSE

    @property
    def wants_try(self) -> bool:
        return self.until_try <= 0 and (self.is_alone or self.wait > HIGH_WAIT)


@dataclass(slots=True)
class TeamSize:
    """`num_threads`: of the whole team."""

    num_threads: int
    _classes: dict[int, _Class] = field(default_factory=dict)

    def choose(self, num_tokens: int) -> int:
        """Threads for the next step of so many tokens."""
        state = self._class(num_tokens)
        return 1 if state.is_alone != state.wants_try else self.num_threads

    def record(self, num_tokens: int, num_threads: int, seconds: float, wait: float) -> None:
        """What a step took per token, and which share of it the threads waited for each other."""
        if self.num_threads == 1:
            return
        state = self._class(num_tokens)
        if state.is_alone == (num_threads == 1):
            self._went_on(state, seconds, wait)
        elif seconds <= state.seconds * MIN_GAIN:
            self._classes[self._bound(num_tokens)] = _Class(
                not state.is_alone, seconds, num_steps=1
            )
        else:
            state.pause = min(2 * state.pause, LONGEST_PAUSE)
            state.until_try = state.pause

    def _went_on(self, state: _Class, seconds: float, wait: float) -> None:
        weight = max(_NEW_WEIGHT, 1 / (state.num_steps + 1))
        state.seconds += weight * (seconds - state.seconds)
        state.wait += weight * (wait - state.wait)
        state.num_steps += 1
        state.until_try -= 1

    def _class(self, num_tokens: int) -> _Class:
        return self._classes.setdefault(self._bound(num_tokens), _Class())

    def _bound(self, num_tokens: int) -> int:
        return next((bound for bound in _CLASSES if num_tokens <= bound), 0)
