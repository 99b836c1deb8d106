"""How fast one stream goes on, by the length of its context and of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from server.bench.errors import NotAvailable
from server.bench.run import Case, Measured, Plan, Round
from server.bench.suites.step_figures import step_figures
from server.bench.target import Target
from server.bench.timing import Timing, decode_rate
from server.bench.workloads import stream_of

NAME = "decode"
CONTEXTS = (64, 512, 2048, 8192)
QUICK_CONTEXTS = (64, 512)
OUTPUTS = (32, 256)
NUM_NEW, QUICK_NUM_NEW = 128, 16


def cases(plan: Plan) -> tuple[Case, ...]:
    num_new = QUICK_NUM_NEW if plan.is_quick else NUM_NEW
    contexts = QUICK_CONTEXTS if plan.is_quick else CONTEXTS
    made = [_case(min(c, plan.max_length - num_new - 1), num_new) for c in contexts]
    by_context = {case.name: case for case in made if case.x and case.x > 0}
    outputs = () if plan.is_quick else OUTPUTS
    by_output = [_case(CONTEXTS[0], n) for n in outputs if CONTEXTS[0] + n < plan.max_length]
    return (*by_context.values(), *by_output)


def _case(context: int, num_new: int) -> Case:
    name = f"context {context}, {num_new} new"
    return Case(NAME, name, partial(measure, context, num_new), context, "context tokens")


async def measure(context: int, num_new: int, target: Target, this: Round) -> Sequence[Measured]:
    """The request's prompt is computed first, in another request, where a server caches it: so
    that the steps counted are those of the answer."""
    prompt = this.tokens.prompt(stream_of(this.seed, NAME, context, num_new), context)
    if target.info.is_hexlm:
        await target.ask(prompt, 1)
    async with target.observed() as seen:
        timing = await target.ask(prompt, num_new)
    rate = rate_of(timing)
    figures = [
        Measured("rate", rate, "tokens/s", is_lower_better=False),
        Measured("TPOT", 1e3 / rate, "ms"),
        Measured("answer", timing.num_tokens, "tokens", is_lower_better=False),
    ]
    return (*figures, *step_figures(seen.change, timing.num_tokens))


def rate_of(timing: Timing) -> float:
    rate = decode_rate(timing)
    if rate is None:
        raise NotAvailable(f"the answer came in one piece of {timing.num_tokens} tokens")
    return rate
