"""Which of the sampled tokens of a step stand, when some rows were computed on drafts.

Row j was computed on the drafts before j. Its token stands if those drafts are what was sampled.
The draw at a position is a function of (seed, position) alone, so the accepted tokens are exactly
those that would have been drawn without drafts: greedy or seeded, nothing is lost (the equality
case of speculative decoding, Leviathan et al. 2023). Where a draft was drawn at random, the sampler
has drawn against it by rejection sampling, and what it gives back equals the draft exactly when
the draft stands: the same comparison serves.
"""

from __future__ import annotations

from engine.sampler import Sampled


def verify(draft_token_ids: list[int], sampled: list[Sampled]) -> list[Sampled]:
    """The longest run whose drafts came true, and the token after it. Ends at a NaN row."""
    for index, draft in enumerate(draft_token_ids):
        if sampled[index].token_id != draft:
            return sampled[: index + 1]
    return sampled
