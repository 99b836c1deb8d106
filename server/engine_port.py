"""What the HTTP side needs of an engine, declared by the one that calls it.

Knows nothing of processes, pipes or supervision: `engine_client.py` provides this for an engine
process, a test provides it with a script.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from engine.device_board import DeviceReport
from scheduler.messages import EngineInfo, GenerationRequest, StepOutput, StepStats, TraceResult
from server.engine_state import EngineState


class Engine(Protocol):
    """One loaded (or loading) model. All members are used from the event loop's thread only."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[StepOutput]:
        """Submit a sequence and return its outputs, the last one with a finish reason.

        Admission is checked before this returns: raises EngineUnavailable while the engine is
        loading, dead or draining, QueueFull when its queue is full; what goes on with an answer
        (`resumed_token_ids`) is let in all the same. `aclose()` of the iterator, also before the
        first output, drops the sequence from the engine.
        """
        ...

    async def trace(self, num_steps: int, timeout_s: float) -> TraceResult:
        """The next `num_steps` steps, or as many as there were after `timeout_s`.

        Raises TraceBusy while another trace runs, and EngineUnavailable.
        """
        ...

    @property
    def info(self) -> EngineInfo | None:
        """None until the engine was ready for the first time."""
        ...

    @property
    def devices(self) -> DeviceReport | None:
        """How its devices are now; None of an engine that has the CPU only, or is not ready."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def state_detail(self) -> str:
        """One sentence about the state: the phase of loading, or why it failed. May be empty."""
        ...

    @property
    def stats(self) -> StepStats:
        """Of the newest step; zeros before the first."""
        ...
