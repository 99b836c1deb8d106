"""One generation as the scheduler sees it: tokens, counters, blocks. Owned by the loop thread.

There are no phases. A sequence has tokens (and perhaps drafts), some of them computed; a step
closes part of the gap. Prefill, decode, a prefix hit, a resumed preemption and the verification
of drafts are the same arithmetic over

    0 ........ num_computed_tokens ........ num_tokens ........ num_tokens + num_drafts
      keys and values in the pages | to compute      | to compute and to verify

Knows nothing of policy, of who else runs, of text or of arrays.
"""

from __future__ import annotations

from enum import IntEnum

from engine.grammar import UNCONSTRAINED, Grammar, GrammarError
from engine.logprobs import TokenLogprobs
from engine.sampler import DrawnDraft
from scheduler.messages import FinishReason, GenerationRequest


class Status(IntEnum):
    """The order carries meaning: everything above RUNNING is finished."""

    WAITING = 0
    RUNNING = 1
    FINISHED_STOP = 2
    FINISHED_LENGTH = 3
    FINISHED_DEADLINE = 4
    FINISHED_ABORT = 5
    FINISHED_ERROR = 6


FINISHED_STATUS = {
    FinishReason.STOP: Status.FINISHED_STOP,
    FinishReason.LENGTH: Status.FINISHED_LENGTH,
    FinishReason.DEADLINE: Status.FINISHED_DEADLINE,
    FinishReason.ABORT: Status.FINISHED_ABORT,
    FinishReason.ERROR: Status.FINISHED_ERROR,
    FinishReason.UNAVAILABLE: Status.FINISHED_ERROR,
}

Rank = tuple[int, bool, float, int]


class Sequence:
    """The mutable state of one request, from `add` until it is finished.

    `token_ids`: prompt, then output; `resumed_token_ids` of the request are output.
    `max_num_tokens`: where it ends with LENGTH at the latest (max_tokens or the context).
    `block_table`: replaced by a new list, never emptied in place, when the blocks are freed, so
    that the identity of the list tells readers whether rows they copied are still right.
    `block_hashes`: digests of the full blocks, extended when needed, valid for life.
    `waiting_since_s`: when it last became unserved; None while it gets its share.
    `prompt_logprobs`: collected so far; None if not asked for, or already sent.
    `devices`: those that did matrix work for it, in the order in which they first did.
    `grammar`: what its output has to match; it is always just behind the newest token.
    `drawn_drafts`: empty, or for each draft what it was drawn from; see `set_drafts`.
    """

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "block_table",
        "devices",
        "draft_token_ids",
        "drawn_drafts",
        "grammar",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "number",
        "prompt_logprobs",
        "rank",
        "request",
        "sampling",
        "status",
        "token_ids",
        "waited_s",
        "waiting_since_s",
        "was_admitted",
    )

    def __init__(
        self,
        request: GenerationRequest,
        number: int,
        now_s: float,
        max_model_len: int,
        grammar: Grammar = UNCONSTRAINED,
    ) -> None:
        """Raises GrammarError if `grammar` does not allow what was generated already."""
        self.request = request
        self.sampling = request.sampling
        self.number = number
        self.arrival_s = request.arrival_s or now_s
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.resumed_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_num_tokens = min(
            self.num_prompt_tokens + request.sampling.max_tokens, max_model_len
        )
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_published_blocks = 0
        self.draft_token_ids: list[int] = []
        self.drawn_drafts: list[DrawnDraft] = []
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.devices: tuple[str, ...] = ()
        self.status = Status.WAITING
        self.was_admitted = False
        self.waited_s = 0.0
        self.waiting_since_s: float | None = self.arrival_s
        self.rank: Rank = (request.priority, True, self.arrival_s, number)
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            None if request.prompt_logprobs is None else []
        )
        self.grammar = grammar
        if grammar.accept(request.resumed_token_ids) < len(request.resumed_token_ids):
            raise GrammarError("what was generated already goes beyond the end of its grammar")

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_drafts(self) -> int:
        return len(self.draft_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens it has and has no keys and values for; drafts not counted."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def wants_token(self) -> bool:
        """False for a prompt that is only to be computed (`max_tokens` 0)."""
        return len(self.token_ids) < self.max_num_tokens

    @property
    def max_num_computed_tokens(self) -> int:
        """The most tokens it will ever hold keys and values for: never for its last one."""
        return max(len(self.token_ids), self.max_num_tokens - 1)

    @property
    def is_finished(self) -> bool:
        return self.status > Status.RUNNING

    def set_drafts(self, token_ids: list[int], drawn: list[DrawnDraft] | None = None) -> None:
        """Replace the drafts. Those that were `drawn` at random are verified by rejection
        sampling, so none of them may be dropped for what it is, only for its place."""
        self.draft_token_ids = token_ids
        self.drawn_drafts = drawn or []

    def keep_drafts(self, num_kept: int) -> None:
        del self.draft_token_ids[num_kept:]
        del self.drawn_drafts[num_kept:]

    def note_devices(self, devices: tuple[str, ...]) -> None:
        if self.devices != devices:
            self.devices = tuple(dict.fromkeys((*self.devices, *devices)))

    def waited_until(self, now_s: float) -> float:
        """Seconds in which it was not served, all stretches together."""
        if self.waiting_since_s is None:
            return self.waited_s
        return self.waited_s + max(0.0, now_s - self.waiting_since_s)

    def stop_waiting(self, now_s: float) -> None:
        self.waited_s = self.waited_until(now_s)
        self.waiting_since_s = None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )
