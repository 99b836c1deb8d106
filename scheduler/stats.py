"""Counts and clocks of the engine, and the snapshot of them that travels with every step."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from engine.lane_usage import NO_USAGE, Usage
from scheduler.messages import StepStats


@dataclass(slots=True)
class Totals:
    """Counted since the engine started; each place that knows of an event counts it.

    `failed_steps` counts every attempt of a step that raised, also when its retry went well,
    `interrupted_steps` those that were given up for a request of a better class.
    `draft_tokens` were checked by the model, `accepted_tokens` of them became output.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    prefix_queried_tokens: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    interrupted_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


PHASES = ("schedule", "build", "execute", "sample", "commit", "propose")


class PhaseTimer:
    """Seconds of one step per phase: `lap` books, and returns, the time since the last lap."""

    __slots__ = ("_last_s", "seconds")

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last_s = perf_counter()

    def start(self) -> None:
        for phase in self.seconds:
            self.seconds[phase] = 0.0
        self._last_s = perf_counter()

    def lap(self, phase: str) -> float:
        now_s = perf_counter()
        seconds, self._last_s = now_s - self._last_s, now_s
        self.seconds[phase] += seconds
        return seconds


def snapshot(
    totals: Totals,
    timer: PhaseTimer,
    *,
    num_running: int,
    num_waiting: int,
    num_blocks: int,
    num_free_blocks: int,
    num_step_tokens: int,
    queue_times_s: list[float],
    usage: Usage = NO_USAGE,
) -> StepStats:
    seconds = timer.seconds
    return StepStats(
        num_running=num_running,
        num_waiting=num_waiting,
        num_blocks=num_blocks,
        num_free_blocks=num_free_blocks,
        num_step_tokens=num_step_tokens,
        total_steps=totals.steps,
        total_prompt_tokens=totals.prompt_tokens,
        total_generated_tokens=totals.generated_tokens,
        total_cached_tokens=totals.cached_tokens,
        total_prefix_queried_tokens=totals.prefix_queried_tokens,
        total_preemptions=totals.preemptions,
        total_failed_steps=totals.failed_steps,
        total_interrupted_steps=totals.interrupted_steps,
        total_draft_tokens=totals.draft_tokens,
        total_accepted_tokens=totals.accepted_tokens,
        schedule_s=seconds["schedule"] + seconds["build"],
        execute_s=seconds["execute"],
        sample_s=seconds["sample"],
        commit_s=seconds["commit"] + seconds["propose"],
        queue_times_s=tuple(queue_times_s),
        devices=usage.devices,
        lanes=usage.lanes,
    )
