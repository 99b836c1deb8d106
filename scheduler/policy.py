"""The decisions of the scheduler: pure functions over plain values, and the numbers they use.

Order. `rank` is (class after aging, capped first, arrival, number); smaller is served first.
A sequence's class improves by one for every `aging_s` seconds in which it was not served, and it
keeps what it has earned while it runs.

Taking from others. A waiting sequence takes seats and blocks only from running sequences whose
class after aging is worse than its own class *before* aging: equals never push each other out,
however long one has waited; waiting long gives the first place in the queue and protection. A
running sequence that must grow takes blocks from any running sequence behind it. A sequence that
was preempted `max_preemptions` times goes to the front of its class, so that from then on only a
better class, or a capped sequence that is older, can take its blocks.

Sharing a step. Worse classes (after aging) pause while a prompt of a better one is computed. Every
other running decode gets its token. Prefills share P = `prefill_budget` tokens: all that is left,
but at most `max_prefill_tokens_with_decodes` while anything decodes, which bounds the gap between
two tokens of a running stream. The first prefill in rank order gets at least 3/4 of P (all of it if
nobody else can use it), the others of its class at least 1/4 in rank order.
Hence, whatever else runs: a prompt of N tokens is computed in at most ceil(N / (P - P // 4))
steps once it ranks first, and a prompt of at most P // 4 tokens that ranks second in its class has
its first token after one step, however long the first one is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.sequence import Rank


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_model_len`, `num_blocks` and `block_size` come from the loaded engine.

    `max_num_seqs`: seats, sequences that run at once. `max_num_batched_tokens`: tokens in a step.
    `aging_s`: seconds without service that are worth one class. `max_logits_rows`: the most rows
    that the runner is asked for; what exceeds the seats serves drafts and prompt logprobs; None:
    64, or `max_num_seqs` if that is more (the engine's default is the same).
    `token_buckets`: sizes of a step that cost no padding, ascending; empty: all sizes are equal.
    """

    max_model_len: int = 0
    num_blocks: int = 0
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_prefill_tokens_with_decodes: int = 128
    max_logits_rows: int | None = None
    enable_prefix_caching: bool = True
    aging_s: float = 10.0
    max_preemptions: int = 3
    token_buckets: tuple[int, ...] = ()

    @property
    def num_logits_rows(self) -> int:
        rows = self.max_logits_rows
        return max(64, self.max_num_seqs) if rows is None else rows


def check_config(config: SchedulerConfig) -> None:
    """Raises ValueError for numbers with which the scheduler could not keep its promises."""
    for name in (
        "max_model_len",
        "num_blocks",
        "block_size",
        "max_num_seqs",
        "max_prefill_tokens_with_decodes",
        "aging_s",
    ):
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} must be positive, got {getattr(config, name)}")
    if config.max_num_batched_tokens <= config.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) must exceed max_num_seqs "
            f"({config.max_num_seqs}), or full seats would leave nothing for prompts"
        )
    if config.num_logits_rows < config.max_num_seqs:
        raise ValueError(
            f"max_logits_rows ({config.num_logits_rows}) must be at least max_num_seqs "
            f"({config.max_num_seqs})"
        )
    if list(config.token_buckets) != sorted(set(config.token_buckets)):
        raise ValueError(f"token_buckets must ascend, got {config.token_buckets}")


def class_after_aging(priority: int, waited_s: float, aging_s: float) -> int:
    """0 is the best class there is."""
    return max(0, priority - int(waited_s / aging_s))


def next_aging_s(waited_s: float, aging_s: float) -> float:
    """Seconds until the class of a sequence that goes on waiting improves again."""
    return aging_s * (math.floor(waited_s / aging_s) + 1) - waited_s


def rank(aged_class: int, is_capped: bool, arrival_s: float, number: int) -> Rank:
    return (aged_class, not is_capped, arrival_s, number)


def may_take_from(priority: int, victim_rank: Rank) -> bool:
    """Whether a waiting sequence of this class (before aging) may push a running one out."""
    return priority < victim_rank[0]


def prefill_budget(config: SchedulerConfig, num_decodes: int) -> int:
    """P, the tokens of this step that prefills share. At least 1."""
    budget = config.max_num_batched_tokens - num_decodes
    return min(budget, config.max_prefill_tokens_with_decodes) if num_decodes else budget


def chunk_allowance(budget: int, is_first: bool, has_others: bool) -> int:
    """How much of what is left of P the next prefill in rank order may use."""
    return budget - budget // 4 if is_first and has_others else budget


def fill_to_bucket(
    num_decode_tokens: int, chunks: Sequence[int], buckets: Sequence[int]
) -> list[int]:
    """The prefill chunks of a step (in rank order), cut so that the total lands on a bucket.

    Only prefills are cut, the last in rank first. If there is a bucket above, padding is the
    better deal unless the one below is nearer and the cut takes at most half of the step. A step
    that is larger than the largest bucket is some of those and a rest. At least one prefill token
    is kept, so a step never loses its prefill to the arithmetic. Without buckets nothing changes.
    """
    total = num_decode_tokens + sum(chunks)
    whole = total // buckets[-1] * buckets[-1] if buckets else 0
    sizes = [whole + rest for rest in (0, *buckets)] if buckets else []
    below = max((size for size in sizes if num_decode_tokens < size <= total), default=None)
    above = min((size for size in sizes if size >= total), default=None)
    if below is None:
        return list(chunks)
    excess, cut = total - below, list(chunks)
    if above is not None and (above - total < excess or 2 * excess > total):
        return cut
    for index in reversed(range(len(cut))):
        taken = min(cut[index], excess)
        cut[index] -= taken
        excess -= taken
    return cut
