"""Prompts that begin alike: what a server saves of time and of memory by computing a prefix once.

A fresh prompt of the same length is asked beside each, so that the saving is a ratio of two times
of the same round. Memory is known of hexlm only, from its count of free blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from server.bench.distribution import percentile
from server.bench.errors import NotAvailable
from server.bench.run import Case, Measured, Plan, Round
from server.bench.target import Target
from server.bench.timing import Timing
from server.bench.together import Together, ask_all, background, fewest_free_blocks, until_idle
from server.bench.workloads import Prompt, chat_turns, common_prefix_batch, stream_of

NAME = "prefixes"
SYSTEM, USER, REPLY, TURNS = 256, 64, 64, 4
AGENT_PREFIX, AGENT_OWN, AGENT_CALLS = 2000, 64, 4
NUM_SAMPLES, SAMPLE_PROMPT = 4, 512
BATCH, BATCH_PREFIX, BATCH_OWN, BATCH_NEW = 10, 2000, 32, 32
AGAIN, QUICK_AGAIN, AGAIN_ROOM = 1000, 200, 16
QUICK_PREFIX = 256


def cases(plan: Plan) -> tuple[Case, ...]:
    longest = QUICK_PREFIX if plan.is_quick else AGENT_PREFIX
    prefix = min(longest, plan.max_length - AGENT_OWN - REPLY)
    chat_tokens = SYSTEM + TURNS * (USER + REPLY)
    made = []
    if chat_tokens < plan.max_length:
        made.append(Case(NAME, f"chat of {TURNS} turns", measure_chat))
    if prefix >= QUICK_PREFIX // 2:
        made += [
            Case(NAME, f"agent, {prefix} of tools", partial(measure_agent, prefix)),
            Case(NAME, f"n = {NUM_SAMPLES}", measure_parallel),
            Case(NAME, f"{BATCH} with {prefix} in common", partial(measure_batch, prefix)),
        ]
    again = QUICK_AGAIN if plan.is_quick else AGAIN
    if again + AGAIN_ROOM < plan.max_length:
        made.append(Case(NAME, f"{again} tokens again", partial(measure_again, again)))
    return tuple(made)


async def measure_chat(target: Target, this: Round) -> Sequence[Measured]:
    turns = chat_turns(this.tokens, stream_of(this.seed, NAME, "chat"), SYSTEM, USER, REPLY, TURNS)
    timings = [await target.ask(turn, REPLY) for turn in turns]
    fresh = this.tokens.prompt(stream_of(this.seed, NAME, "fresh chat"), len(turns[-1]))
    return saving(timings[1:], await target.ask(fresh, 2))


async def measure_agent(prefix: int, target: Target, this: Round) -> Sequence[Measured]:
    generator = stream_of(this.seed, NAME, "agent", prefix)
    first, *calls = common_prefix_batch(this.tokens, generator, prefix, AGENT_OWN, AGENT_CALLS)
    fresh = await target.ask(first, REPLY)
    return saving([await target.ask(call, REPLY) for call in calls], fresh)


async def measure_again(length: int, target: Target, this: Round) -> Sequence[Measured]:
    """The same prompt twice: the second time, all but its last tokens are known."""
    prompt = this.tokens.prompt(stream_of(this.seed, NAME, "again", length), length)
    fresh = await target.ask(prompt, 2)
    known = await target.ask(prompt, 2)
    share = 100 * known.ttft_s / fresh.ttft_s
    return (*saving([known], fresh), Measured("TTFT, known of fresh", share, "%"))


def saving(hits: Sequence[Timing], fresh: Timing) -> list[Measured]:
    """Of the last of `hits` in time (the longest prefix), of all of them in tokens."""
    ttft_s = hits[-1].ttft_s
    return [
        Measured("TTFT, prefix known", 1e3 * ttft_s, "ms"),
        Measured("TTFT, all fresh", 1e3 * fresh.ttft_s, "ms"),
        Measured("TTFT saved", 100 * (1 - ttft_s / fresh.ttft_s), "%", is_lower_better=False),
        *cached_figures(hits),
    ]


def cached_figures(timings: Sequence[Timing]) -> list[Measured]:
    """Nothing where the server's usage does not tell."""
    cached = [timing.num_cached_tokens for timing in timings]
    asked = sum(timing.num_prompt_tokens or 0 for timing in timings)
    if not asked or None in cached:
        return []
    share = 100 * sum(count or 0 for count in cached) / asked
    return [Measured("prompt tokens cached", share, "%", is_lower_better=False)]


async def measure_parallel(target: Target, this: Round) -> Sequence[Measured]:
    """n answers to one prompt in one request, against as many requests with own prompts."""
    generator = stream_of(this.seed, NAME, "parallel")
    prompt, *others = [
        this.tokens.prompt(generator, SAMPLE_PROMPT // 2) for _ in range(NUM_SAMPLES + 1)
    ]
    timing = await target.ask(prompt, BATCH_NEW, n=NUM_SAMPLES, temperature=1.0)
    apart = await ask_all(target, others, BATCH_NEW)
    return (
        Measured(f"{NUM_SAMPLES} answers, one prompt", 1e3 * timing.total_s, "ms"),
        Measured(f"{NUM_SAMPLES} answers, own prompts", 1e3 * apart.wall_s, "ms"),
    )


async def measure_batch(prefix: int, target: Target, this: Round) -> Sequence[Measured]:
    """All at once after one that computed the prefix."""
    generator = stream_of(this.seed, NAME, "batch", prefix)
    first, *prompts = common_prefix_batch(this.tokens, generator, prefix, BATCH_OWN, BATCH + 1)
    await target.ask(first, 2)
    if not target.info.is_hexlm:
        return batch_figures(await ask_all(target, prompts, BATCH_NEW))
    free = await until_idle(target)
    fewest: list[float] = [free]
    async with background(partial(fewest_free_blocks, target, fewest)):
        done = await ask_all(target, prompts, BATCH_NEW)
    return (*batch_figures(done), memory_saved(target, prompts, free - fewest[0]))


def batch_figures(done: Together) -> list[Measured]:
    ttft_s = percentile([timing.ttft_s for timing in done.timings], 0.95)
    figures = [Measured("TTFT p95", 1e3 * ttft_s, "ms"), Measured("all", 1e3 * done.wall_s, "ms")]
    return figures + cached_figures(done.timings)


def memory_saved(target: Target, prompts: Sequence[Prompt], used_blocks: float) -> Measured:
    """The blocks that the batch held at its height, of what it would hold without sharing."""
    if used_blocks <= 0:
        raise NotAvailable("the batch ended before its blocks could be counted")
    size = target.info.block_size
    alone = sum(-(-(len(prompt) + BATCH_NEW) // size) for prompt in prompts)
    return Measured("KV against no sharing", 100 * used_blocks / alone, "%")
