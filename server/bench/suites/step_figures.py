"""What hexlm's own counters say of the steps behind an answer; other servers do not tell."""

from __future__ import annotations

from server.bench.metrics_text import MetricsChange
from server.bench.run import Measured

OWN_PHASES = ("schedule", "sample", "commit")
EXECUTE, OWN_WORK, QUEUE = "step: execute", "step: own work", "queue"
ALL_TOKENS, ROWS = "tokens a step", "rows a step"


def step_figures(change: MetricsChange | None, num_tokens: int) -> list[Measured]:
    """Means over the steps: the model's part, the scheduler's and sampler's, tokens of answers,
    and rows that were computed for them: guesses that were wrong are rows, too."""
    if change is None or (execute_s := change.step_s("execute")) is None:
        return []
    own_s = change.step_s(*OWN_PHASES) or 0.0
    num_wrong = change.of("draft_tokens_total") - change.of("accepted_tokens_total")
    return [
        Measured(EXECUTE, 1e3 * execute_s, "ms"),
        Measured(OWN_WORK, 1e3 * own_s, "ms"),
        Measured(ALL_TOKENS, num_tokens / change.num_steps, "tokens", is_lower_better=False),
        Measured(ROWS, (num_tokens + num_wrong) / change.num_steps, "rows"),
    ]


def queue_figures(change: MetricsChange | None) -> list[Measured]:
    if change is None or (queue_s := change.queue_s) is None:
        return []
    return [Measured(QUEUE, 1e3 * queue_s, "ms")]
