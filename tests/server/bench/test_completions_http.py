"""The HTTP side of libraries that have none, over a socket, with a library that counts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from server.bench.probing import probe
from server.bench.target import Target
from server.bench.timing import Timing
from tests.bench.peers.completions_http import Asked, Refused, Runner, Server, parse


@dataclass
class CountingLibrary:
    """Every step gives each answer its next token: 7, 8, 9 …, and takes `step_s`. `fails_after`:
    steps until its work is gone."""

    model: str = "counting"
    max_length: int = 64
    step_s: float = 0.0
    fails_after: int | None = None
    running: dict[int, int] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    most_running: int = 0
    num_steps: int = 0

    @property
    def has_work(self) -> bool:
        return self.fails_after is None or self.num_steps < self.fails_after

    def begin(self, number: int, prompt: Sequence[int], num_new: int) -> None:
        self.running[number] = 7

    def step(self) -> Iterator[tuple[int, Sequence[int]]]:
        time.sleep(self.step_s)
        self.num_steps += 1
        self.most_running = max(self.most_running, len(self.running))
        for number, token in self.running.items():
            yield number, (token,)
            self.running[number] += 1

    def leave(self, number: int) -> None:
        del self.running[number]
        self.left.append(number)


def tokens_of(asked: Asked) -> list[int]:
    found: list[int] = []
    while not asked.news.empty():
        found += asked.news.get() or [-1]
    return found


def test_answers_run_side_by_side_and_end_at_their_length() -> None:
    library = CountingLibrary()
    runner = Runner(library)
    short, long = Asked([1], 2), Asked([1, 2], 3)
    runner.submit(short)
    runner.submit(long)
    for _ in range(3):
        runner.turn()
    assert (tokens_of(short), tokens_of(long)) == ([7, 8], [7, 8, 9])
    assert (library.most_running, library.left, library.running) == (2, [0, 1], {})


def test_who_has_left_is_left_in_the_library_too() -> None:
    library = CountingLibrary()
    runner = Runner(library)
    asked, other = Asked([1], 50), Asked([1], 50)
    runner.submit(asked)
    runner.submit(other)
    runner.turn()
    asked.is_left = True
    runner.turn()
    assert library.left == [0]
    assert (len(tokens_of(asked)), len(tokens_of(other))) == (1, 2)


def test_a_library_that_ends_early_is_an_error_and_no_wait() -> None:
    runner = Runner(CountingLibrary(fails_after=1))
    asked = Asked([1], 5)
    runner.submit(asked)
    runner.turn()
    runner.turn()
    assert tokens_of(asked) == [7, -1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": "text"}, "list of token ids"),
        ({"prompt": []}, "list of token ids"),
        ({"max_tokens": 0}, "above 0"),
        ({"n": 2}, "one greedy answer"),
        ({"temperature": 0.7}, "one greedy answer"),
        ({"stream": False}, "stream true"),
        ({"max_tokens": 63}, r"2 \+ 63 tokens do not fit into 64"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, object], reason: str) -> None:
    body = {"prompt": [1, 2], "max_tokens": 62, "stream": True, "temperature": 0}
    assert parse(body, 64).num_new == 62
    with pytest.raises(Refused, match=reason):
        parse(body | changes, 64)


@contextmanager
def served(library: CountingLibrary) -> Iterator[str]:
    runner = Runner(library)
    server = Server(0, runner)
    for run in (server.serve_forever, runner.run_forever):
        threading.Thread(target=run, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


async def drive(url: str) -> tuple[Target, list[Timing]]:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        target = await probe("counting", client, None)
        return target, await asyncio.gather(*(target.ask((1, 2, 3), n) for n in (4, 9)))


def test_the_benchmarks_client_can_drive_it() -> None:
    with served(CountingLibrary()) as url:
        target, timings = asyncio.run(drive(url))
    assert (target.info.model, target.info.max_model_len) == ("counting", 64)
    assert target.dialect.knows_ignore_eos
    assert [timing.num_prompt_tokens for timing in timings] == [3, 3]
    assert [timing.num_completion_tokens for timing in timings] == [4, 9]
    assert [len(timing.arrivals_s) for timing in timings] == [4, 9]


def test_a_client_that_goes_away_ends_its_answer() -> None:
    library = CountingLibrary(max_length=10_000, step_s=0.001)

    async def leave(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            target = await probe("counting", client, None)
            await target.ask((1, 2, 3), 9_000, leave_after=2)

    with served(library) as url:
        asyncio.run(leave(url))
        end_s = time.monotonic() + 5
        while library.running and time.monotonic() < end_s:
            time.sleep(0.01)
    assert library.running == {}
    assert library.num_steps < 5_000
