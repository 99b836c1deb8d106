"""What is asked of a server: prompts and times of arrival, all of them from a seed.

A prompt is a list of random token ids, so that nothing but what a figure is about shares a prefix,
and two servers are asked exactly the same. For servers that take no ids, the same numbers choose
words. Pure; knows no servers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

Prompt = tuple[int, ...]

_SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "po", "ri", "sa", "te", "vu", "we", "xo", "zi")


def stream_of(seed: int, *names: object) -> random.Random:
    """A generator of its own for every combination of names, the same on every machine."""
    text = "\x1f".join(map(str, (seed, *names)))
    return random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()))


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The ids that prompts are made of: `start` up to but without `stop`."""

    start: int = 1_000
    stop: int = 30_000

    def prompt(self, generator: random.Random, num_tokens: int) -> Prompt:
        return tuple(generator.randrange(self.start, self.stop) for _ in range(num_tokens))


def words_of(prompt: Prompt, words_per_token: float = 1.0) -> str:
    """As text, for servers that take no token ids: one made-up word per number."""
    count = max(1, round(len(prompt) * words_per_token))
    return " ".join(_word(prompt[i % len(prompt)] + i // len(prompt)) for i in range(count))


def _word(number: int) -> str:
    first, second = divmod(number, len(_SYLLABLES))
    return _SYLLABLES[second] + _SYLLABLES[first % len(_SYLLABLES)]


def poisson_arrivals(generator: random.Random, rate: float, count: int) -> tuple[float, ...]:
    """Seconds after the start: exponential gaps with a mean of 1 / `rate`; the first at 0."""
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + generator.expovariate(rate))
    return tuple(times)


def burst_arrivals(rate: float, count: int, burst_size: int) -> tuple[float, ...]:
    """The same mean rate in bursts: `burst_size` requests at one moment, then a pause."""
    return tuple(index // burst_size * burst_size / rate for index in range(count))


def chat_turns(
    tokens: TokenRange, generator: random.Random, system: int, user: int, reply: int, turns: int
) -> tuple[Prompt, ...]:
    """The prompts of one conversation: each begins with all of the one before it.

    The replies are random tokens, too, as many as the answers have: what a server really said
    differs between servers.
    """
    history = tokens.prompt(generator, system)
    prompts = []
    for _ in range(turns):
        history += tokens.prompt(generator, user)
        prompts.append(history)
        history += tokens.prompt(generator, reply)
    return tuple(prompts)


def common_prefix_batch(
    tokens: TokenRange, generator: random.Random, prefix: int, own: int, count: int
) -> tuple[Prompt, ...]:
    """`count` prompts with the same first `prefix` tokens and `own` tokens of their own."""
    shared = tokens.prompt(generator, prefix)
    return tuple(shared + tokens.prompt(generator, own) for _ in range(count))


def lengths_up_to(limit: int, lengths: Sequence[int], room: int) -> tuple[int, ...]:
    """Those of `lengths` that fit in `limit` tokens beside `room` tokens of an answer."""
    return tuple(length for length in lengths if length + room <= limit)
