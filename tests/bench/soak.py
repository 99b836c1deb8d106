"""Mixed load with cancels against one server for a long time, and whether anything grows (RS-01).

    hexlm pull smollm2-135m-instruct
    python -m tests.bench.soak [--minutes 30] [--requests N] [--streams 8] [--json FILE] \\
        [--plots FOLDER]

Of every ten requests two are left in the middle, one has two choices and one a schema; every third
is of the low class, and every fourth begins as the others of its kind do. Every `SAMPLE_S` the
load pauses until nothing runs, and all of the server's processes are looked at: resident memory,
threads, open files, free blocks. Ends with 1 if the verdict (`soak_verdict.py`) is bad.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from server.bench.plots import Plot, Point, check_matplotlib, draw
from server.bench.server_process import RunningServer
from server.cli.serve import interrupted_by_sigterm
from tests.bench.servers import start_hexlm
from tests.bench.soak_verdict import Sample, judge

MODEL = "smollm2-135m-instruct"
SAMPLE_S = 10.0
MAX_ERRORS_SHOWN = 10

_CONTEXT_LENGTH = 1024
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True)
class Load:
    """`num_requests` None: as many as the time allows."""

    seconds: float
    num_requests: int | None
    num_streams: int
    max_prompt: int


@dataclass(slots=True)
class Soak:
    """Sends requests to one server. `errors`: what was wrong with answers."""

    server: RunningServer
    load: Load
    errors: list[str] = field(default_factory=list)

    def run(self) -> Iterator[Sample]:
        """A sample before the load, though after a first answer, and one after each part of it."""
        url = f"http://127.0.0.1:{self.server.port}"
        limits = httpx.Limits(max_connections=self.load.num_streams)
        with (
            httpx.Client(base_url=url, timeout=300, limits=limits, trust_env=False) as client,
            ThreadPoolExecutor(self.load.num_streams) as pool,
        ):
            self._ask(client, 1)  # An engine counts its blocks with its first step.
            began_s = time.monotonic()
            yield self._sample(client, 0.0, 0)
            numbers, num_done = count(), 0
            while not self._is_over(time.monotonic() - began_s, num_done):
                until_s = time.monotonic() + SAMPLE_S
                parts = [pool.submit(self._stream, client, numbers, until_s)
                         for _ in range(self.load.num_streams)]  # fmt: skip
                num_done += sum(part.result() for part in parts)
                yield self._sample(client, time.monotonic() - began_s, num_done)

    def _is_over(self, seconds: float, num_done: int) -> bool:
        most = self.load.num_requests
        return seconds >= self.load.seconds or most is not None and num_done >= most

    def _stream(self, client: httpx.Client, numbers: Iterator[int], until_s: float) -> int:
        """One request after another until it is time; how many."""
        num_done = 0
        while time.monotonic() < until_s:
            number = next(numbers)
            if self.load.num_requests is not None and number >= self.load.num_requests:
                break
            self._ask(client, number)
            num_done += 1
        return num_done

    def _ask(self, client: httpx.Client, number: int) -> None:
        """One request, its answer read to the end or, every fifth time, left after a line."""
        path, asked = body(number, self.load.max_prompt)
        last = ""
        try:
            with client.stream("POST", path, json=asked | {"stream": True}) as response:
                if response.status_code != 200:
                    content = response.read().decode(errors="replace")
                    self.errors.append(f"request {number}: HTTP {response.status_code}: {content}")
                    return
                for line in response.iter_lines():
                    last = line or last
                    if number % 5 == 0 or line.startswith('data: {"error"'):
                        break
        except httpx.HTTPError as error:
            self.errors.append(f"request {number}: {error!r}")
            return
        if number % 5 and last != "data: [DONE]":
            self.errors.append(f"request {number}: its answer ends with {last[:200]}")

    def _sample(self, client: httpx.Client, seconds: float, num_requests: int) -> Sample:
        """Once nothing runs any more."""
        health: dict[str, Any] = {"num_running": 1}
        while health["num_running"] or health.get("num_waiting"):
            time.sleep(0.1)
            health = client.get("/health").json()["models"][MODEL]
        processes = self.server.processes()
        return Sample(
            seconds,
            num_requests,
            processes[0].memory_info().rss,
            sum(process.memory_info().rss for process in processes[1:]),
            sum(process.num_threads() for process in processes),
            sum(_num_files(process) for process in processes),
            health["num_free_blocks"],
            len(self.errors),
        )


def body(number: int, max_prompt: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request; every tenth has two choices, every tenth a schema."""
    priority = {"priority": "low"} if number % 3 == 0 else {}
    if number % 10 == 7:
        messages = [{"role": "user", "content": f"Is {number} even?"}]
        asked = {"messages": messages, "max_tokens": 16, "response_format": _SCHEMA}
        return "/v1/chat/completions", asked | priority
    rng = random.Random(number)
    prompt = [rng.randrange(1_000, 40_000) for _ in range(rng.randrange(1, max_prompt))]
    if number % 4 == 0:
        prompt = list(range(2_000, 2_000 + max_prompt // 2)) + prompt[: max_prompt // 2]
    choices = 2 if number % 10 == 3 else 1
    asked = {"prompt": prompt, "max_tokens": rng.randrange(1, 48), "n": choices}
    return "/v1/completions", asked | priority


def _num_files(process: psutil.Process) -> int:
    return int(process.num_fds() if hasattr(process, "num_fds") else process.num_handles())


def show(samples: list[Sample], errors: list[str], console: Console) -> bool:
    """Whether the verdict is good."""
    columns = ("minutes", "requests", "server MB", "engine MB", "threads", "files", "free blocks")
    table = Table(*columns, title=MODEL)
    step = max(1, len(samples) // 20)
    for one in samples[:-1:step] + samples[-1:]:
        sizes = (f"{size / 1e6:.1f}" for size in (one.server_bytes, one.engine_bytes))
        counts = (str(n) for n in (one.num_threads, one.num_files, one.num_free_blocks))
        table.add_row(f"{one.seconds / 60:.1f}", str(one.num_requests), *sizes, *counts)
    console.print(table)
    for error in errors[:MAX_ERRORS_SHOWN]:
        console.print(error[:300], markup=False)
    verdict = judge(samples)
    for line in verdict.lines():
        console.print(line)
    return verdict.is_good


def plot_of(samples: list[Sample]) -> Plot:
    lines = {
        "all processes": [one.resident_bytes / 1e6 for one in samples],
        "server": [one.server_bytes / 1e6 for one in samples],
        "engine": [one.engine_bytes / 1e6 for one in samples],
    }
    minutes = [one.seconds / 60 for one in samples]
    points = {
        name: tuple(Point(x, y, y, y) for x, y in zip(minutes, values, strict=True))
        for name, values in lines.items()
    }
    return Plot("soak: resident memory", "minutes", "MB", points)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mixed load with cancels; does anything grow?")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--requests", type=int, help="end after so many, if that is sooner")
    parser.add_argument("--streams", type=int, default=8, help="at one time")
    parser.add_argument("--max-prompt", type=int, default=512, help="tokens")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path, help="draw resident memory into this folder")
    options = parser.parse_args()
    if options.plots:
        check_matplotlib()
    console = Console(width=100, highlight=False)
    samples: list[Sample] = []
    load = Load(60 * options.minutes, options.requests, options.streams, options.max_prompt)
    with interrupted_by_sigterm(), tempfile.TemporaryDirectory() as name:
        length = str(_CONTEXT_LENGTH)
        flags = ("--model", MODEL, "--kv-memory", "128MiB", "--max-model-len", length)
        server = start_hexlm(Path(name), *flags)
        soak = Soak(server, load)
        try:
            for one in soak.run():
                samples.append(one)
        except KeyboardInterrupt:
            console.print("ended early")
        finally:
            server.stop()
    if len(samples) < 2:
        sys.exit("it ended before there was anything to judge")
    is_good = show(samples, soak.errors, console)
    if options.json:
        record = {"samples": [asdict(one) for one in samples], "errors": soak.errors}
        options.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    if options.plots:
        draw([plot_of(samples)], options.plots)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
