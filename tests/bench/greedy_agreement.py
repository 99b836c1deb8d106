"""hexlm against llama.cpp's own server: the same GGUF file, the same prompts, greedy, over HTTP.

    hexlm pull gemma3-270m
    python -m tests.bench.greedy_agreement gemma3-270m [--tokens 20] [--kv-format f32] [--json FILE]

Both get the same token ids; keys and values are not quantized unless asked for, since llama.cpp
keeps them as halves. A prompt is *clear* when hexlm's own margin, the distance of the two
most likely tokens in nats, is at least `MIN_MARGIN` at every step: two right engines that round
differently may only part where it is smaller. Every clear prompt must agree in every token; where
another one parts, the margin at that place is shown. Judges nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from server.bench.server_process import RunningServer
from server.model_store import ModelStore
from tests.bench.servers import start_hexlm, start_peer

MIN_MARGIN = 0.5
"""Measured: 8-bit activations move the difference of two logits by up to 0.3 nats, in either."""

NUM_CLEAR = 20
TIMEOUT_S = 300
PROMPTS = (
    "1, 2, 3, 4, 5, 6,",
    "10, 20, 30, 40, 50, 60,",
    "2, 4, 6, 8, 10, 12, 14,",
    "100, 99, 98, 97, 96, 95,",
    "A B C D E F G H",
    "a, b, c, d, e, f,",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    "January, February, March, April, May, June,",
    "one two three four five six",
    "one, two, three, one, two, three, one, two, three,",
    "The cat sat on the mat. The cat sat on the mat. The cat sat on the",
    "red green blue red green blue red green blue red",
    "Hello, world! Hello, world! Hello, world! Hello,",
    "yes no yes no yes no yes no yes no",
    "la la la la la la la la la la",
    "0 1 0 1 0 1 0 1 0 1 0 1",
    "I will not talk in class. I will not talk in class. I will not talk in class.",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i in range(10):\n",
    "x = 1\nx = 2\nx = 3\nx = 4\nx = 5\n",
    "item 1\nitem 2\nitem 3\nitem 4\nitem 5\n",
    "Chapter 1\nChapter 2\nChapter 3\nChapter 4\n",
    "- apples\n- pears\n- apples\n- pears\n- apples\n- pears\n-",
    "<li>one</li>\n<li>two</li>\n<li>one</li>\n<li>two</li>\n<li>one</li>\n",
    '{"a": 1, "b": 2}\n{"a": 1, "b": 2}\n{"a": 1, "b": 2}\n',
    "import numpy as np\nimport numpy as np\nimport numpy as np\nimport",
    "To be, or not to be. To be, or not to be. To be, or not to be. To",
    "All work and no play makes Jack a dull boy. All work and no play makes Jack a dull boy. All",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The",
    "Row, row, row your boat. Row, row, row your boat. Row, row,",
    "ping pong ping pong ping pong ping pong ping",
    "Name: Ann, Age: 30\nName: Ann, Age: 30\nName: Ann, Age: 30\nName:",
    "1+1=2\n1+1=2\n1+1=2\n1+1=2\n",
    "AAAA BBBB AAAA BBBB AAAA BBBB AAAA",
    "north south east west north south east west north south east",
    "0, 5, 10, 15, 20, 25, 30,",
    "2001, 2002, 2003, 2004, 2005, 2006,",
    "Step 1: wait. Step 2: wait. Step 3: wait. Step 4: wait.",
    "do re mi fa so la ti do re mi fa so la ti do re mi",
    "left, right, left, right, left, right, left,",
    "The answer is 42. The answer is 42. The answer is 42. The answer",
    "<p>Hello</p>\n<p>Hello</p>\n<p>Hello</p>\n<p>Hello</p>\n",
    "tick tock tick tock tick tock tick tock",
    "3, 6, 9, 12, 15, 18, 21,",
    "4, 8, 12, 16, 20, 24, 28,",
    "1000, 2000, 3000, 4000, 5000,",
    "100, 200, 300, 400, 500, 600,",
    "50, 51, 52, 53, 54, 55, 56,",
    "11, 12, 13, 14, 15, 16, 17,",
    "1990, 1991, 1992, 1993, 1994, 1995,",
    "25, 50, 75, 100, 125, 150,",
    "[1, 2, 3, 4, 5, 6, 7, 8,",
    "(1) (2) (3) (4) (5) (6) (7) (8)",
    "Page 1 Page 2 Page 3 Page 4 Page 5 Page 6",
    "Week 1: rest\nWeek 2: rest\nWeek 3: rest\nWeek 4: rest\n",
    "Day 1\nDay 2\nDay 3\nDay 4\nDay 5\n",
    "Figure 1. Figure 2. Figure 3. Figure 4. Figure 5. Figure",
    "line 10\nline 11\nline 12\nline 13\nline 14\n",
    "<td>1</td><td>2</td><td>3</td><td>4</td><td>5</td>",
    "<h1>Title</h1>\n<h1>Title</h1>\n<h1>Title</h1>\n<h1>Title</h1>\n",
    "id,name\n1,a\n2,a\n3,a\n4,a\n5,a\n6,a\n",
    "a1 a2 a3 a4 a5 a6 a7 a8",
    "The capital of France is",
    "Once upon a time",
    "Water boils at a temperature of",
    "def add(a, b):\n    return",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`num_equal` tokens from the start agree; `margins` are hexlm's, in nats, one a token."""

    prompt: str
    num_equal: int
    num_tokens: int
    margins: tuple[float, ...]
    text: str
    peer_text: str

    @property
    def min_margin(self) -> float:
        return min(self.margins)

    @property
    def is_clear(self) -> bool:
        return len(self.margins) == self.num_tokens and self.min_margin >= MIN_MARGIN

    @property
    def agrees(self) -> bool:
        return self.num_equal == self.num_tokens


def post(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def compare(
    hexlm: RunningServer, peer: RunningServer, model: str, prompt: str, num_tokens: int
) -> Comparison:
    tokens = post(peer, "/tokenize", {"content": prompt, "add_special": True})["tokens"]
    ours = post(
        hexlm,
        "/v1/completions",
        {
            "model": model,
            "prompt": tokens,
            "max_tokens": num_tokens,
            "temperature": 0,
            "logprobs": 2,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )["choices"][0]
    theirs = post(
        peer,
        "/completion",
        {
            "prompt": tokens,
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        },
    )
    pairs = zip(ours["token_ids"], theirs["tokens"], strict=False)
    num_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), num_tokens)
    margins = [margin(top) for top in ours["logprobs"]["top_logprobs"]]
    return Comparison(
        prompt, num_equal, num_tokens, tuple(margins), ours["text"], theirs["content"]
    )


def margin(top: dict[str, float]) -> float:
    """Of the two most likely tokens. Two tokens of the same text fall together: no margin."""
    values = sorted(top.values(), reverse=True)
    return values[0] - values[1] if len(values) > 1 else 0.0


def run(model: str, num_tokens: int, kv_format: str) -> list[Comparison]:
    gguf = Path(ModelStore().open(model).source.path)
    with tempfile.TemporaryDirectory() as folder:
        options = ("--model", model, "--max-model-len", "1024", "--kv-format", kv_format)
        hexlm = start_hexlm(Path(folder), *options)
        try:
            peer = start_peer(Path(folder), gguf, num_slots=1)
            try:
                return [compare(hexlm, peer, model, prompt, num_tokens) for prompt in PROMPTS]
            finally:
                peer.stop()
        finally:
            hexlm.stop()


def show(model: str, results: list[Comparison]) -> bool:
    """Prints the table; whether enough prompts are clear and all of them agree."""
    table = Table(title=f"{model}: greedy, hexlm and llama.cpp (margins in nats)")
    for column in ("prompt", "clear", "equal tokens", "smallest margin", "margin where they part"):
        table.add_column(column)
    for item in results:
        parted = "" if item.agrees else f"{item.margins[item.num_equal]:.3f}"
        equal = f"{item.num_equal} of {item.num_tokens}"
        clear = "yes" if item.is_clear else ""
        table.add_row(repr(item.prompt)[:44], clear, equal, f"{item.min_margin:.3f}", parted)
    Console(width=120).print(table)
    clear_ones = [item for item in results if item.is_clear]
    agreeing = sum(item.agrees for item in clear_ones)
    print(
        f"{agreeing} of {len(clear_ones)} clear prompts (margin >= {MIN_MARGIN} nats at every "
        f"step) agree in all {results[0].num_tokens} tokens; "
        f"{sum(item.agrees for item in results)} of all {len(results)} prompts do"
    )
    return len(clear_ones) >= NUM_CLEAR and agreeing == len(clear_ones)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--kv-format", default="f32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = run(arguments.model, arguments.tokens, arguments.kv_format)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(item) for item in results], indent=1))
    return 0 if show(arguments.model, results) else 1


if __name__ == "__main__":
    sys.exit(main())
