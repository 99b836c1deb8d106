"""What one step brought for one sequence, as a message; and when a sequence ends.

Reads sequences and results; changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.grammar import GrammarError
from engine.logprobs import TokenLogprobs
from engine.sampler import Sampled
from scheduler.messages import FinishReason, StepOutput
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts of a sequence that one step checked, and those of them that became output."""

    num_drafted: int = 0
    num_accepted: int = 0


NO_DRAFTS = DraftCounts()

NAN_ERROR = "the model returned NaN for this sequence, so no token could be chosen"


def ended_output(sequence: Sequence, reason: FinishReason, error: str | None = None) -> StepOutput:
    """The end of a sequence that got no token with it: abort, deadline or error."""
    return StepOutput(
        sequence.request_id,
        finish_reason=reason,
        num_cached_tokens=sequence.num_cached_tokens,
        error=error,
        devices=sequence.devices,
    )


def grammar_error(error: GrammarError) -> str:
    """The sentence for a sequence whose grammar cannot go on."""
    return f"the output could not be kept to its grammar: {error}"


def refused_output(request_id: str, error: str) -> StepOutput:
    """The end of a request that never became a sequence."""
    return StepOutput(request_id, finish_reason=FinishReason.ERROR, error=error)


def token_output(
    sequence: Sequence,
    new_tokens: list[Sampled],
    new_token_ids: tuple[int, ...],
    reason: FinishReason | None,
    prompt_logprobs: list[TokenLogprobs] | None,
    drafts: DraftCounts = NO_DRAFTS,
) -> StepOutput:
    """`prompt_logprobs`: of all prompt tokens but the first, when they are to be sent now."""
    return StepOutput(
        sequence.request_id,
        new_token_ids,
        reason,
        _stop_token(sequence, new_token_ids[-1]) if reason is FinishReason.STOP else None,
        _token_logprobs(new_tokens) if sequence.sampling.logprobs is not None else None,
        None if prompt_logprobs is None else (None, *prompt_logprobs),
        sequence.num_cached_tokens,
        num_draft_tokens=drafts.num_drafted,
        num_accepted_tokens=drafts.num_accepted,
        devices=sequence.devices,
    )


def _stop_token(sequence: Sequence, last_token_id: int) -> int | None:
    """None if it was a grammar that stopped the sequence, behind a token that is text."""
    return last_token_id if last_token_id in sequence.sampling.stop_token_ids else None


def end_of(sequence: Sequence, new_token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
    """How many of the new tokens count, and whether the sequence ends with the last of those.

    The first stop token ends it, once `min_tokens` tokens exist with it; else the number of
    tokens does: `max_tokens` or a full context. STOP wins if both happen at one token.
    """
    params = sequence.sampling
    num_tokens, num_prompt = len(sequence.token_ids), sequence.num_prompt_tokens
    for index, token_id in enumerate(new_token_ids):
        num_tokens += 1
        if token_id in params.stop_token_ids and num_tokens - num_prompt >= params.min_tokens:
            return index + 1, FinishReason.STOP
        if num_tokens >= sequence.max_num_tokens:
            return index + 1, FinishReason.LENGTH
    return len(new_token_ids), None


def _token_logprobs(new_tokens: list[Sampled]) -> tuple[TokenLogprobs, ...]:
    return tuple(token.logprobs for token in new_tokens if token.logprobs is not None)
