"""Many requests of varying length against one server, and whether anything grows (case RS-01).

    hexlm pull smollm2-135m-instruct
    python -m tests.bench.soak [--requests 5000] [--json FILE]

Of every ten requests two are left in the middle, one has two choices and one a schema. At the end
of every hundredth part the server's processes are looked at: resident memory, threads, open files,
and free blocks. The figure is the slope of memory over the second half: in the first, the pages of
keys and values are touched for the first time.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from server.bench.server_process import RunningServer
from tests.bench.servers import start_hexlm

MODEL = "smollm2-135m-instruct"
MAX_SLOPE_BYTES = 1e6
"""Of resident memory per 1,000 requests."""

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
class Sample:
    """The server after `num_requests`: resident bytes of the process that serves and of those
    that compute, and counts over all of them."""

    num_requests: int
    server_bytes: int
    engine_bytes: int
    num_threads: int
    num_files: int
    num_free_blocks: int

    @property
    def resident_bytes(self) -> int:
        return self.server_bytes + self.engine_bytes


def body(number: int, max_prompt: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request; every tenth has two choices, every tenth a schema."""
    if number % 10 == 7:
        messages = [{"role": "user", "content": f"Is {number} even?"}]
        asked = {"messages": messages, "max_tokens": 16, "response_format": _SCHEMA}
        return "/v1/chat/completions", asked
    rng = random.Random(number)
    prompt = [rng.randrange(1_000, 40_000) for _ in range(rng.randrange(1, max_prompt))]
    choices = 2 if number % 10 == 3 else 1
    return "/v1/completions", {"prompt": prompt, "max_tokens": rng.randrange(1, 12), "n": choices}


def ask(client: httpx.Client, number: int, max_prompt: int) -> int:
    """One request, its answer read to the end or, every fifth time, left after a line."""
    path, asked = body(number, max_prompt)
    with client.stream("POST", path, json=asked | {"stream": True}) as response:
        lines = response.iter_lines()
        if number % 5 == 0:
            next(lines, None)
        else:
            for _ in lines:
                pass
        return int(response.status_code)


def sample(server: RunningServer, client: httpx.Client, num_requests: int) -> Sample:
    """Once nothing runs any more."""
    health: dict[str, Any] = {"num_running": 1}
    while health["num_running"] or health.get("num_waiting"):
        time.sleep(0.1)
        health = client.get("/health").json()["models"][MODEL]
    processes = server.processes()
    return Sample(
        num_requests,
        processes[0].memory_info().rss,
        sum(process.memory_info().rss for process in processes[1:]),
        sum(process.num_threads() for process in processes),
        sum(_num_files(process) for process in processes),
        health["num_free_blocks"],
    )


def _num_files(process: psutil.Process) -> int:
    return int(process.num_fds() if hasattr(process, "num_fds") else process.num_handles())


def soak(
    server: RunningServer, num_requests: int, max_prompt: int, console: Console
) -> Iterator[Sample]:
    size = max(1, num_requests // 100)
    url = f"http://127.0.0.1:{server.port}"
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(4) as pool:
        ask(client, 1, max_prompt)  # An engine counts its blocks with its first step.
        yield sample(server, client, 0)
        for first in range(0, num_requests, size):
            numbers = range(first, min(first + size, num_requests))
            statuses = list(pool.map(lambda number: ask(client, number, max_prompt), numbers))
            if bad := [status for status in statuses if status != 200]:
                console.print(f"after {first} requests: {len(bad)} answers like {bad[0]}")
            yield sample(server, client, numbers.stop)


def slope_bytes(samples: Sequence[Sample]) -> float:
    """Least-squares growth of resident memory per 1,000 requests, over the second half."""
    warm = [s for s in samples if s.num_requests >= samples[-1].num_requests / 2]
    x, y = ([s.num_requests / 1000 for s in warm], [s.resident_bytes for s in warm])
    return float(np.polyfit(x, y, 1)[0])


def show(samples: list[Sample], console: Console) -> None:
    columns = ("requests", "server MB", "engine MB", "threads", "files", "free blocks")
    table = Table(*columns, title=MODEL)
    for one in samples[:: max(1, len(samples) // 20)] + samples[-1:]:
        sizes = (f"{size / 1e6:.1f}" for size in (one.server_bytes, one.engine_bytes))
        counts = (str(n) for n in (one.num_threads, one.num_files, one.num_free_blocks))
        table.add_row(str(one.num_requests), *sizes, *counts)
    console.print(table)
    slope = slope_bytes(samples)
    verdict = "flat" if slope < MAX_SLOPE_BYTES else "GROWS"
    console.print(
        f"memory over the second half: {slope / 1e6:+.2f} MB per 1,000 requests: {verdict}"
    )
    leaked = samples[0].num_free_blocks - samples[-1].num_free_blocks
    console.print(f"blocks that never came back: {leaked}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Many requests; does anything grow?")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--max-prompt", type=int, default=512, help="tokens")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=100, highlight=False)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as name:
        length = str(_CONTEXT_LENGTH)
        flags = ("--model", MODEL, "--kv-memory", "64MiB", "--max-model-len", length)
        server = start_hexlm(Path(name), *flags)
        try:
            for one in soak(server, options.requests, options.max_prompt, console):
                samples.append(one)
        finally:
            server.stop()
    show(samples, console)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in samples], indent=1))


if __name__ == "__main__":
    main()
