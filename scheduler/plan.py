"""What one step will compute, and what came of it. Values between the parts of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.logprobs import TokenLogprobs
from engine.sampler import Sampled
from scheduler.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """Parallel lists, one entry per sequence of the step, in rank order.

    `num_tokens`: tokens to compute, from `num_computed_tokens` on, drafts included.
    `num_prompt_rows`: rows of logits for the logprobs of prompt tokens, one for each of the first
    tokens of the chunk. `num_sample_rows`: rows to sample from, the chunk's last ones; 0 for a
    chunk that leaves a rest, else 1 + the number of drafts. The logits hold, sequence after
    sequence, the prompt rows and then the sample rows. `admitted`: those that are in a step for
    the first time, `queue_times_s` how long each of them had waited.
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_prompt_rows: list[int] = field(default_factory=list)
    num_sample_rows: list[int] = field(default_factory=list)
    total_tokens: int = 0
    queue_times_s: list[float] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def only(self, index: int) -> Plan:
        """The same step for one of its sequences alone."""
        return Plan(
            [self.sequences[index]],
            [self.num_tokens[index]],
            [self.num_prompt_rows[index]],
            [self.num_sample_rows[index]],
            self.num_tokens[index],
        )

    def without_sequences(self) -> Plan:
        """What is left of a step that was given up: who was admitted remains so."""
        return Plan(queue_times_s=self.queue_times_s, admitted=self.admitted)


@dataclass(slots=True)
class StepResults:
    """`sampled`: per sequence of the plan, one entry per sample row. `prompt_logprobs` and
    `errors` (sentences for the client) only hold the indices of sequences that have some.
    `is_unavailable`: the errors are that the only device that may compute is not there."""

    sampled: list[list[Sampled]] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    is_unavailable: bool = False
