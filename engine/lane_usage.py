"""How much each device has done. Plain values: they cross the process boundary with every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneUsage:
    """Of one device since the engine started. A step that was divided counts for each of them.

    `num_faults`: how often it was closed because of one. `copied_bytes`: between host and device.
    """

    name: str
    num_steps: int = 0
    num_tokens: int = 0
    num_faults: int = 0
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """`devices` did the matrix work of the newest step, the NPU first."""

    devices: tuple[str, ...] = ()
    lanes: tuple[LaneUsage, ...] = ()


NO_USAGE = Usage()


def no_usage() -> Usage:
    """Of a runner that does not say."""
    return NO_USAGE
