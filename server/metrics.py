"""Prometheus metrics, names modelled on vLLM's with the prefix `hexlm:`.

Fed from two sides: `observe_step` with each engine step's stats, and the request observers with
what clients saw. One registry per `Metrics`, so that tests and apps do not share state. Knows
nothing of HTTP or of engines. Every series is labelled with `model_name`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.device_board import DeviceReport
from scheduler.messages import EngineInfo, StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SHORT_SECONDS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_STEP_SECONDS = (0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)

_GAUGES = {
    "num_requests_running": "Sequences that are running.",
    "num_requests_waiting": "Sequences that wait for a place.",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1.",
    "kv_blocks_total": "KV blocks of the engine.",
    "kv_blocks_free": "KV blocks that nothing refers to.",
}
_COUNTERS = {
    "prompt_tokens": ("total_prompt_tokens", "Prompt tokens computed."),
    "generation_tokens": ("total_generated_tokens", "Tokens generated."),
    "prefix_cache_queries": ("total_prefix_queried_tokens", "Prompt tokens looked up."),
    "prefix_cache_hits": ("total_cached_tokens", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("total_preemptions", "Sequences preempted."),
    "draft_tokens": ("total_draft_tokens", "Tokens that were guessed and then checked."),
    "accepted_tokens": ("total_accepted_tokens", "Guessed tokens that became output."),
    "engine_steps": ("total_steps", "Steps of the engine."),
    "engine_failed_steps": ("total_failed_steps", "Steps of the engine that raised."),
    "engine_interrupted_steps": (
        "total_interrupted_steps",
        "Steps that were given up for a request of a better class.",
    ),
}
_LANE_COUNTERS = {
    "lane_steps": ("num_steps", "Steps in which a device did matrix work."),
    "lane_tokens": ("num_tokens", "Tokens of those steps."),
    "lane_faults": ("num_faults", "Times that a device was closed because of a fault."),
    "lane_copied_bytes": ("copied_bytes", "Bytes copied between host and device buffers."),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two outputs of one sequence.", _SHORT_SECONDS),
    "e2e_request_latency_seconds": ("Arrival to the end of a sequence.", _SECONDS),
    "request_queue_time_seconds": ("Arrival to the first step of a sequence.", _SECONDS),
}
_PHASES = ("schedule", "execute", "sample", "commit")


class Metrics:
    """All methods are cheap and are called in the event loop's thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ["model_name"]
        self._gauges = {
            name: Gauge(f"hexlm:{name}", text, labels, registry=self._registry)
            for name, text in _GAUGES.items()
        }
        self._counters = {
            name: Counter(f"hexlm:{name}", text, labels, registry=self._registry)
            for name, (_, text) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"hexlm:{name}", text, labels, buckets=b, registry=self._registry)
            for name, (text, b) in _HISTOGRAMS.items()
        }
        self._step_s = Histogram(
            "hexlm:step_time_seconds",
            "Time of one engine step by phase.",
            [*labels, "phase"],
            buckets=_STEP_SECONDS,
            registry=self._registry,
        )
        self._success = Counter(
            "hexlm:request_success",
            "Sequences that ended, by reason.",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        self._info = Gauge(
            "hexlm:engine_info",
            "1; what the engine runs on.",
            [*labels, "device", "kv_format", "weight_format"],
            registry=self._registry,
        )
        self._lanes = {
            name: Counter(f"hexlm:{name}", text, [*labels, "lane"], registry=self._registry)
            for name, (_, text) in _LANE_COUNTERS.items()
        }
        self._lane_state = Gauge(
            "hexlm:lane_open",
            "1 if a device of the engine may compute now, 0 if it is opened or closed.",
            [*labels, "lane"],
            registry=self._registry,
        )
        self._last: dict[str, StepStats] = {}
        self._counted: dict[str, StepStats] = {}
        # Looking a labelled series up costs more than observing it, and steps are many.
        self._series: dict[tuple[str, str], Histogram] = {}
        self._phases: dict[str, list[Histogram]] = {}

    def observe_step(self, model: str, stats: StepStats) -> None:
        """Take in the stats of one step. Totals that fell show a restarted engine."""
        last = self._last.get(model)
        if last is not None and _has_fallen(stats, last):
            self._count(model)
            self._counted[model] = StepStats()
        self._last[model] = stats
        times_s = (stats.schedule_s, stats.execute_s, stats.sample_s, stats.commit_s)
        for series, time_s in zip(self._phase_series(model), times_s, strict=True):
            series.observe(time_s)
        for queue_time_s in stats.queue_times_s:
            self._observe("request_queue_time_seconds", model, queue_time_s)

    def observe_engine(self, model: str, info: EngineInfo) -> None:
        """Say what an engine runs on; the blocks are known before its first step."""
        self._info.labels(model, info.device, info.kv_format, info.weight_format).set(1)
        if model not in self._last:
            self._last[model] = StepStats(
                num_blocks=info.num_blocks, num_free_blocks=info.num_blocks
            )

    def observe_devices(self, model: str, report: DeviceReport) -> None:
        """Which devices of an engine are open."""
        for lane in report.lanes:
            self._lane_state.labels(model, lane.name).set(lane.state == "open")

    def observe_first_token(self, model: str, seconds: float) -> None:
        self._observe("time_to_first_token_seconds", model, seconds)

    def observe_next_token(self, model: str, seconds: float) -> None:
        self._observe("inter_token_latency_seconds", model, seconds)

    def observe_finished(self, model: str, reason: str, seconds: float) -> None:
        """A sequence ended: `reason` is "stop", "length", "abort", "deadline" or "error"."""
        self._success.labels(model, reason).inc()
        self._observe("e2e_request_latency_seconds", model, seconds)

    def render(self) -> bytes:
        """The text format of Prometheus."""
        for model, stats in self._last.items():
            self._count(model)
            self._set_gauges(model, stats)
        return generate_latest(self._registry)

    def _observe(self, name: str, model: str, seconds: float) -> None:
        series = self._series.get((name, model))
        if series is None:
            series = self._series[name, model] = self._histograms[name].labels(model)
        series.observe(seconds)

    def _phase_series(self, model: str) -> list[Histogram]:
        series = self._phases.get(model)
        if series is None:
            series = [self._step_s.labels(model, phase) for phase in _PHASES]
            self._phases[model] = series
        return series

    def _count(self, model: str) -> None:
        """Bring the counters up to the last step's totals."""
        now, before = self._last[model], self._counted.get(model, StepStats())
        self._counted[model] = now
        for name, (total, _) in _COUNTERS.items():
            self._counters[name].labels(model).inc(getattr(now, total) - getattr(before, total))
        counted = {lane.name: lane for lane in before.lanes}
        for lane in now.lanes:
            for name, (total, _) in _LANE_COUNTERS.items():
                news = getattr(lane, total) - getattr(counted.get(lane.name), total, 0)
                self._lanes[name].labels(model, lane.name).inc(news)

    def _set_gauges(self, model: str, stats: StepStats) -> None:
        used = stats.num_blocks - stats.num_free_blocks
        values = {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage_perc": used / stats.num_blocks if stats.num_blocks else 0.0,
            "kv_blocks_total": stats.num_blocks,
            "kv_blocks_free": stats.num_free_blocks,
        }
        for name, value in values.items():
            self._gauges[name].labels(model).set(value)


def _has_fallen(now: StepStats, before: StepStats) -> bool:
    return any(getattr(now, total) < getattr(before, total) for total, _ in _COUNTERS.values())
