"""What bounds a step: its time against what the machine can do, as a verdict in words.

`Facts` are numbers from a benchmark or a trace; the rules over them are pure. The limits are those
of the roofline (`engine/roofline.py`). Where a number is unknown, the rules that need it are left
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

QUEUE_SHARE = 0.5
OWN_WORK_SHARE = 0.25
PART_SHARE = 0.5
NEAR_LIMIT = 0.4
"""Below this share of the limit, neither limit is what bounds the step."""

FLOAT_COST = 4
"""Attention computes in float32: a vector holds 4 times as many int8 values."""


class Bound(StrEnum):
    COMPUTE = "compute"
    BANDWIDTH = "memory bandwidth"
    ATTENTION = "attention"
    OVERHEAD = "the work around the model"
    QUEUEING = "queueing"
    NPU_CALLS = "NPU calls"
    UNEXPLAINED = "none of the limits"
    UNKNOWN = "unknown"


KNOBS = {
    Bound.COMPUTE: "more cores (--threads), a smaller model, prompts that share their beginnings "
    "(computed once), or an NPU (--device auto)",
    Bound.BANDWIDTH: "fewer bytes a step: 4-bit weights (hexlm quantize), more requests at a time, "
    "which share one reading of the weights, or speculation ([speculation] method)",
    Bound.ATTENTION: "smaller keys and values (--kv-format int8 or int4) or shorter contexts",
    Bound.OVERHEAD: "fewer and larger steps: more requests at a time, no logprobs, penalties or "
    "grammars where they are not needed; a core that is free for the server process",
    Bound.QUEUEING: "more seats ([scheduler] max_num_seqs), more memory for keys and values "
    "(--kv-memory), priorities for what must not wait, or less load",
    Bound.NPU_CALLS: "fewer calls: graphs with the attention inside ([npu] fused = true), larger "
    "token buckets in the device's file; hexlm npu-report measures what a call costs",
    Bound.UNEXPLAINED: "what else runs on this machine, --threads, then hexlm trace: it shows "
    "where the threads wait",
    Bound.UNKNOWN: "hexlm explain --machine measures what is missing",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one step, or of one prompt; None is not known.

    `step_s`: as it was seen from outside; `clocked_s`: by the engine's own clock, from scheduling
    to committing. `own_s`: scheduling, sampling, committing, and whatever
    passes between two steps. `queue_s`: before the first step. `bandwidth` in bytes and `peak` in
    operations, per second. `attention_operations` are in float32.
    """

    what: str
    step_s: float
    clocked_s: float | None = None
    own_s: float | None = None
    queue_s: float | None = None
    attention_s: float | None = None
    npu_s: float | None = None
    num_npu_calls: float = 0.0
    weight_bytes: float | None = None
    kv_bytes: float = 0.0
    operations: float = 0.0
    attention_operations: float = 0.0
    bandwidth: float | None = None
    peak: float | None = None

    @property
    def weights_s(self) -> float:
        return (self.weight_bytes or 0.0) / self.bandwidth if self.bandwidth else 0.0

    @property
    def kv_s(self) -> float:
        return self.kv_bytes / self.bandwidth if self.bandwidth else 0.0

    @property
    def matrix_s(self) -> float:
        return self.operations / self.peak if self.peak else 0.0

    @property
    def attention_compute_s(self) -> float:
        return FLOAT_COST * self.attention_operations / self.peak if self.peak else 0.0

    @property
    def has_limits(self) -> bool:
        return None not in (self.bandwidth, self.peak, self.weight_bytes)

    @property
    def limit_s(self) -> float:
        """The least that a step can take: its bytes or its operations, whichever binds."""
        return max(self.weights_s + self.kv_s, self.matrix_s + self.attention_compute_s)

    @property
    def ratio(self) -> float | None:
        """Of the limit and the time taken: 1 is as fast as the machine can."""
        return self.limit_s / self.step_s if self.has_limits and self.step_s else None

    @property
    def clocked_ratio(self) -> float | None:
        """The same for the step alone, without the way to the client and back."""
        return self.limit_s / self.clocked_s if self.has_limits and self.clocked_s else None


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    bound: Bound
    numbers: str

    @property
    def knob(self) -> str:
        return KNOBS[self.bound]


def explain(facts: Facts) -> Verdict:
    """The first rule that applies, from the outside inwards: waiting, calls, own work, model."""
    bound = _outer_bound(facts) or _model_bound(facts)
    return Verdict(facts.what, bound, _numbers(bound, facts))


def _outer_bound(facts: Facts) -> Bound | None:
    queue_s, step_s = facts.queue_s or 0.0, facts.step_s
    if queue_s > QUEUE_SHARE * (queue_s + step_s):
        return Bound.QUEUEING
    if (facts.npu_s or 0.0) > PART_SHARE * step_s:
        return Bound.NPU_CALLS
    if (facts.own_s or 0.0) > OWN_WORK_SHARE * step_s:
        return Bound.OVERHEAD
    if (facts.attention_s or 0.0) > PART_SHARE * step_s:
        return Bound.ATTENTION
    return None


def _model_bound(facts: Facts) -> Bound:
    ratio = facts.ratio
    if ratio is None:
        return Bound.UNKNOWN
    if ratio < NEAR_LIMIT:
        return Bound.UNEXPLAINED
    if facts.weights_s + facts.kv_s > facts.matrix_s + facts.attention_compute_s:
        return Bound.ATTENTION if facts.kv_s > facts.weights_s else Bound.BANDWIDTH
    return Bound.ATTENTION if facts.attention_compute_s > facts.matrix_s else Bound.COMPUTE


def _numbers(bound: Bound, facts: Facts) -> str:
    took = f"{_ms(facts.step_s)}"
    if bound is Bound.QUEUEING:
        return f"{_ms(facts.queue_s or 0.0)} of waiting for the first step, then {took}"
    if bound is Bound.NPU_CALLS:
        return f"{took}, of which {_ms(facts.npu_s or 0.0)} in {facts.num_npu_calls:.0f} NPU calls"
    if bound is Bound.OVERHEAD:
        share = 100 * (facts.own_s or 0.0) / facts.step_s
        return f"{took}, of which {_ms(facts.own_s or 0.0)} ({share:.0f} %) not in the model"
    if bound is Bound.ATTENTION and facts.attention_s is not None:
        return f"{took}, of which {_ms(facts.attention_s)} in attention"
    return f"{took}{_limits(facts)}"


def _limits(facts: Facts) -> str:
    if facts.bandwidth is None or facts.peak is None or facts.ratio is None:
        return ""
    num_mb = ((facts.weight_bytes or 0.0) / 1e6, facts.kv_bytes / 1e6)
    operations = facts.operations + FLOAT_COST * facts.attention_operations
    return (
        f"; {num_mb[0]:,.1f} MB of weights and {num_mb[1]:,.1f} MB of keys and values at "
        f"{facts.bandwidth / 1e9:.1f} GB/s take {_ms(facts.weights_s + facts.kv_s)}, "
        f"{operations / 1e9:,.2f} G operations at {facts.peak / 1e9:,.0f} G/s take "
        f"{_ms(facts.matrix_s + facts.attention_compute_s)}: {facts.ratio:.2f} of the limit"
        f"{_clocked(facts)}"
    )


def _clocked(facts: Facts) -> str:
    if facts.clocked_ratio is None:
        return ""
    return f" ({facts.clocked_ratio:.2f} by the engine's own clock)"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
