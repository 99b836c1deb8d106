"""How one sequence picks its tokens. Values only; `sampler.py` gives them their meaning."""

from __future__ import annotations

from dataclasses import dataclass

GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Frozen and already validated: the server refuses bad values before one of these exists.

    `temperature` below 1e-5 and `top_k == 1` are greedy. `top_k == 0` keeps every token.
    `repetition_penalty` counts prompt and output; presence and frequency count the output only.
    `seed` is always set: the draw at a position is a pure function of (seed, position).
    `is_seeded` False: nobody asked for that seed, so drafts of a draft model may be verified by
    rejection sampling, which draws other tokens from the same distribution.
    `stop_token_ids` already holds the model's end tokens, unless they are to be ignored.
    They are masked out until `min_tokens` tokens exist.
    `logprobs`: None for none, k for the sampled token's and the k most likely ones'.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    is_seeded: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1
