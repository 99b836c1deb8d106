"""hexlm against llama.cpp's own server: same GGUF file, same machine, 2 threads each, over HTTP.

    hexlm pull smollm2-135m-instruct
    python -m tests.bench.compare_peers [--rounds 5] [--json FILE]

Rounds alternate between the servers, so that a machine that drifts slows both; medians and
ratios of medians are reported. Every prompt is fresh random token ids, so no cache helps unless
the figure is about the cache. Measures; judges nothing but whether a bar is met.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from server.model_store import ModelStore
from tests.bench.servers import NUM_THREADS, RunningServer, start_hexlm, start_peer
from tests.bench.sse_client import stream, stream_all

MODEL = "smollm2-135m-instruct"
NUM_STREAMS = 8
NUM_NEW = 128


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `met` compares with the bar that the figure was set."""

    name: str
    hexlm: str
    peer: str
    result: str
    bar: str
    met: bool


def prompt(num_tokens: int) -> list[int]:
    return [random.randrange(1_000, 40_000) for _ in range(num_tokens)]


def body(token_ids: list[int], num_new: int) -> dict[str, Any]:
    """Greedy, exactly `num_new` tokens, in words that both servers understand."""
    return {
        "model": MODEL,
        "prompt": token_ids,
        "max_tokens": num_new,
        "temperature": 0,
        "ignore_eos": True,
    }


def decode_rate(port: int) -> float:
    return stream(port, body(prompt(64), NUM_NEW)).tokens_per_s


def time_to_first(port: int) -> float:
    return stream(port, body(prompt(512), 2)).first_s


def aggregate_rate(port: int) -> float:
    wall_s, timings = stream_all(port, [body(prompt(64), NUM_NEW) for _ in range(NUM_STREAMS)])
    return sum(timing.num_tokens for timing in timings) / wall_s


def cached_prefix_ratio(port: int) -> float:
    """TTFT with 1,000 cached tokens and 16 fresh ones, over TTFT with all of them fresh."""
    prefix = prompt(1000)
    miss = stream(port, body(prefix + prompt(16), 2)).first_s
    return stream(port, body(prefix + prompt(16), 2)).first_s / miss


def overhead_ms(port: int, num_streams: int) -> float:
    """Milliseconds per step in schedule, batch building, sampling and commit."""
    before = _phase_sums(port)
    stream_all(port, [body(prompt(16), NUM_NEW) for _ in range(num_streams)])
    after = _phase_sums(port)
    num_steps = after["steps"] - before["steps"]
    phases = ("schedule", "sample", "commit")
    return 1e3 * sum(after[phase] - before[phase] for phase in phases) / num_steps


def _phase_sums(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    pattern = r'^hexlm:step_time_seconds_(sum|count)\{.*phase="(\w+)"\} (\S+)$'
    found = re.findall(pattern, text, re.MULTILINE)
    sums = {phase: float(value) for kind, phase, value in found if kind == "sum"}
    return sums | {"steps": max(float(value) for kind, _, value in found if kind == "count")}


def against_peer(
    measure: Callable[[int], float], servers: list[RunningServer], rounds: int
) -> tuple[float, float]:
    """Medians (hexlm, peer) of interleaved rounds, after one that is not counted."""
    results: dict[str, list[float]] = {server.name: [] for server in servers}
    for number in range(rounds + 1):
        for server in servers if number % 2 else servers[::-1]:
            value = measure(server.port)
            if number:
                results[server.name].append(value)
    return median(results["hexlm"]), median(results["llama.cpp"])


def compare(servers: list[RunningServer], rounds: int) -> Iterator[Figure]:
    hexlm = servers[0]
    ours, theirs = against_peer(decode_rate, servers, rounds)
    yield _ratio("decode, 1 stream, tok/s", ours, theirs, ours / theirs, 1.2)
    ours, theirs = against_peer(time_to_first, servers, rounds)
    yield _ratio("TTFT, 512 fresh tokens, s", ours, theirs, theirs / ours, 2.2)
    ours, theirs = against_peer(aggregate_rate, servers, rounds)
    yield _ratio("8 streams, aggregate tok/s", ours, theirs, ours / theirs, 2.0)
    cached = median(cached_prefix_ratio(hexlm.port) for _ in range(rounds))
    yield _at_most("TTFT, 1,000 cached tokens / miss", cached, 0.15, "")
    for num_streams, limit in ((1, 0.3), (32, 2.0)):
        spent = median(overhead_ms(hexlm.port, num_streams) for _ in range(min(rounds, 3)))
        yield _at_most(f"schedule + batch + sample, {num_streams} running", spent, limit, " ms")


def memory(folder: Path) -> Figure:
    """With pages for 8,192 tokens of int8 KV, after a prompt that fills them."""
    config = ModelStore().open(MODEL).config
    tokens = 8192
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * (config.head_size + 4) * tokens
    server = start_hexlm(folder, "--kv-memory", str(kv_bytes), "--kv-format", "int8")
    try:
        stream(server.port, body(prompt(tokens - 16), 8))
        resident_mb = server.resident_bytes() / 1e6
    finally:
        server.stop()
    return _at_most("resident memory, 8k tokens of int8 KV", resident_mb, 900, " MB")


def _ratio(name: str, ours: float, theirs: float, ratio: float, bar: float) -> Figure:
    result = f"{ratio:.2f} x"
    return Figure(name, f"{ours:.3g}", f"{theirs:.3g}", result, f">= {bar} x", ratio >= bar)


def _at_most(name: str, value: float, bar: float, unit: str) -> Figure:
    shown = f"{value:.3g}{unit}"
    return Figure(name, shown, "", shown, f"<= {bar}{unit}", value <= bar)


def downloaded_gguf() -> Path:
    """The file that the bundle was imported from. Raises FileNotFoundError."""
    folder = ModelStore().downloads_dir / MODEL
    for path in folder.glob("*.gguf"):
        return path
    raise FileNotFoundError(f"no GGUF file in {folder}: run hexlm pull {MODEL}")


@contextmanager
def both_servers(folder: Path, gguf: Path) -> Iterator[list[RunningServer]]:
    servers: list[RunningServer] = []
    try:
        servers.append(start_hexlm(folder, "--kv-memory", "512MiB"))
        servers.append(start_peer(folder, gguf, NUM_STREAMS))
        yield servers
    finally:
        for server in servers:
            server.stop()


def show(figures: list[Figure]) -> None:
    title = f"{MODEL}, {NUM_THREADS} threads, {platform.machine()} {platform.system()}"
    table = Table("figure", "hexlm", "llama.cpp", "result", "bar", "met", title=title)
    for figure in figures:
        row = (figure.name, figure.hexlm, figure.peer, figure.result, figure.bar)
        table.add_row(*row, "yes" if figure.met else "NO")
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with both_servers(folder, downloaded_gguf()) as servers:
            figures = list(compare(servers, options.rounds))
        figures.append(memory(folder))
    show(figures)
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
