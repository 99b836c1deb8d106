"""From a benchmark's file to the facts of its steps. Pure.

A step's cost is that of the model at the middle of the answer; of a prompt, that of all its tokens
with one row of logits. The weights are read once a step, however many rows share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.roofline import Roofline
from server.bench.explanation import Facts
from server.bench.results import Results, Samples
from server.bench.suites import arrivals, concurrency, decode, prefill
from server.bench.suites.step_figures import ALL_TOKENS, EXECUTE, OWN_WORK, QUEUE, ROWS

Medians = Mapping[str, float]


def facts_of(results: Results, roofline: Roofline | None) -> list[Facts]:
    """Of the first server's figures, in the order of the file."""
    if not results.targets:
        return []
    target = next(iter(results.targets))
    known = results.targets[target]
    cost = Cost(known.get("cost") or {}, str(known.get("kv_format", "")), roofline)
    return [
        facts
        for (suite, case, x), medians in _cases(results, target).items()
        if (facts := _facts(suite, case, x, medians, cost)) is not None
    ]


def _cases(results: Results, target: str) -> dict[tuple[str, str, float], Medians]:
    cases: dict[tuple[str, str, float], dict[str, float]] = {}
    for key, targets in results.figures.items():
        spread = targets.get(target, Samples()).spread
        if spread is not None:
            cases.setdefault((key.suite, key.case, key.x or 0.0), {})[key.name] = spread.median
    return dict(cases)


class Cost:
    """What steps of this model move and compute; nothing where it is not known."""

    def __init__(self, known: Mapping[str, Any], kv_format: str, limits: Roofline | None) -> None:
        self._known, self._limits = known, limits
        self._kv_bytes = float((known.get("kv_bytes_per_token") or {}).get(kv_format, 0))

    def step(self, num_rows: float, num_sequences: float, context: float) -> dict[str, Any]:
        """Of a step that decodes `num_rows` tokens of sequences with so many tokens each."""
        if not self._known:
            return {}
        each = self._known["layer_operations"] + self._known["head_operations"]
        attention = self._known["attention_operations"] * num_rows * context
        moved = self._kv_bytes * num_sequences * context
        return self._limited(num_rows, moved, each * num_rows, attention)

    def prompt(self, num_tokens: float) -> dict[str, Any]:
        if not self._known:
            return {}
        operations = self._known["layer_operations"] * num_tokens + self._known["head_operations"]
        attention = self._known["attention_operations"] * num_tokens * (num_tokens + 1) / 2
        return self._limited(num_tokens, self._kv_bytes * num_tokens, operations, attention)

    def traced(
        self, num_tokens: float, num_rows: float, num_keys: float, num_attended: float
    ) -> dict[str, Any]:
        """Of a step with so many tokens, rows of logits, tokens in its contexts, and pairs of a
        token and one that it attends to."""
        if not self._known:
            return {}
        operations = self._known["layer_operations"] * num_tokens
        operations += self._known["head_operations"] * num_rows
        attention = self._known["attention_operations"] * num_attended
        return self._limited(num_tokens, self._kv_bytes * num_keys, operations, attention)

    def _limited(
        self, num_rows: float, kv_bytes: float, operations: float, attention: float
    ) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "weight_bytes": float(self._known["weight_bytes"]),
            "kv_bytes": kv_bytes,
            "operations": operations,
            "attention_operations": attention,
        }
        if self._limits is not None:
            facts["bandwidth"] = self._limits.bandwidth_bytes_per_s
            facts["peak"] = self._limits.peak(self._known["weight_bits"], round(num_rows))
        return facts


def _facts(suite: str, case: str, x: float, medians: Medians, cost: Cost) -> Facts | None:
    what = f"{suite}, {case}"
    if suite == prefill.NAME and "TTFT" in medians:
        return Facts(what, medians["TTFT"] / 1e3, **cost.prompt(x))
    if suite == decode.NAME and "TPOT" in medians:
        tokens = medians.get(ALL_TOKENS, 1.0)
        wall_s = medians["TPOT"] / 1e3 * max(1.0, tokens)
        middle = x + medians.get("answer", 0.0) / 2
        rows = max(1.0, medians.get(ROWS, tokens))
        return _step(what, wall_s, medians, cost.step(rows, 1, middle))
    if suite == concurrency.NAME and ALL_TOKENS in medians and "rate, all" in medians:
        tokens = medians[ALL_TOKENS]
        rows = medians.get(ROWS, tokens)
        middle = concurrency.PROMPT + concurrency.NUM_NEW / 2
        wall_s = tokens / medians["rate, all"]
        return _step(what, wall_s, medians, cost.step(rows, min(x, tokens), middle))
    if suite == arrivals.NAME and "TTFT p50" in medians:
        queue_s = medians.get(QUEUE, 0.0) / 1e3
        return Facts(
            what,
            max(0.0, medians["TTFT p50"] / 1e3 - queue_s),
            queue_s=queue_s,
            **cost.prompt(arrivals.PROMPT),
        )
    return None


def _step(what: str, wall_s: float, medians: Medians, limits: Mapping[str, Any]) -> Facts:
    """What the engine does not spend in the model is its own work, between two steps too."""
    own_s = clocked_s = None
    if EXECUTE in medians:
        own_s = max(0.0, wall_s - medians[EXECUTE] / 1e3)
        clocked_s = (medians[EXECUTE] + medians.get(OWN_WORK, 0.0)) / 1e3
    return Facts(what, wall_s, clocked_s=clocked_s, own_s=own_s, **limits)
