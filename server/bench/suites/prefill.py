"""How long a prompt takes, by its length: fresh tokens, so that no cache helps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from server.bench.run import Case, Measured, Plan, Round
from server.bench.target import Target
from server.bench.workloads import lengths_up_to, stream_of

NAME = "prefill"
LENGTHS = (128, 512, 1024, 2048, 4096, 8192)
QUICK_LENGTHS = (128, 512)
ROOM = 16


def cases(plan: Plan) -> tuple[Case, ...]:
    lengths = lengths_up_to(plan.max_length, QUICK_LENGTHS if plan.is_quick else LENGTHS, ROOM)
    return tuple(
        Case(NAME, f"{length} tokens", partial(measure, length), length, "prompt tokens")
        for length in lengths
    )


async def measure(length: int, target: Target, this: Round) -> Sequence[Measured]:
    prompt = this.tokens.prompt(stream_of(this.seed, NAME, length), length)
    timing = await target.ask(prompt, 2)
    count = timing.num_prompt_tokens or length
    return (
        Measured("TTFT", 1e3 * timing.ttft_s, "ms"),
        Measured("rate", count / timing.ttft_s, "tokens/s", is_lower_better=False),
    )
