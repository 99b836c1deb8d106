"""As much of OpenAI's /v1/completions as `hexlm bench` asks for, for libraries without a server.

Runs in a library's own environment, so it needs nothing but Python. Prompts are token ids, answers
are greedy, streamed and exactly as long as asked for. A chunk has the token's number for a text:
what is measured is the library, not the writing of words. Knows no library.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol


class Refused(ValueError):
    """The message is what a 400 says."""


class Library(Protocol):
    """Used by one thread. Answers are told apart by a number that `begin` is given."""

    model: str
    max_length: int

    @property
    def has_work(self) -> bool: ...

    def begin(self, number: int, prompt: Sequence[int], num_new: int) -> None: ...

    def step(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Does some work; which answers have got which tokens."""
        ...

    def leave(self, number: int) -> None:
        """Ends an answer that is not finished, or forgets one that is."""
        ...


@dataclass
class Asked:
    """One request on its way between a connection's thread and the library's.

    `news`: token ids, or None after the library has failed. `num_done`: tokens handed out.
    """

    prompt: list[int]
    num_new: int
    number: int = -1
    num_done: int = 0
    news: queue.SimpleQueue[list[int] | None] = field(default_factory=queue.SimpleQueue)
    is_left: bool = False


class Runner:
    """The library's thread: takes what is asked, steps, hands out tokens."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._inbox: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._running: dict[int, Asked] = {}
        self._next_number = 0

    def submit(self, asked: Asked) -> None:
        self._inbox.put(asked)

    def run_forever(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        """Waits for a request where there is nothing else to do."""
        if not self._running:
            self._begin(self._inbox.get())
        while not self._inbox.empty():
            self._begin(self._inbox.get())
        for asked in [each for each in self._running.values() if each.is_left]:
            self._end(asked)
        if not self.library.has_work:
            for asked in list(self._running.values()):
                asked.news.put(None)
                self._end(asked)
            return
        for number, tokens in self.library.step():
            if tokens and number in self._running:
                self._running[number].news.put(list(tokens))
                self._running[number].num_done += len(tokens)
        for asked in [each for each in self._running.values() if each.num_done >= each.num_new]:
            self._end(asked)

    def _begin(self, asked: Asked) -> None:
        asked.number = self._next_number
        self._next_number += 1
        self._running[asked.number] = asked
        self.library.begin(asked.number, asked.prompt, asked.num_new)

    def _end(self, asked: Asked) -> None:
        del self._running[asked.number]
        self.library.leave(asked.number)


def parse(body: dict[str, Any], max_length: int) -> Asked:
    """Raises Refused."""
    prompt, num_new = body.get("prompt"), body.get("max_tokens", 16)
    if not isinstance(prompt, list) or not prompt or not all(type(t) is int for t in prompt):
        raise Refused("prompt must be a list of token ids here")
    if not isinstance(num_new, int) or num_new < 1:
        raise Refused("max_tokens must be a whole number above 0")
    if body.get("n", 1) != 1 or body.get("temperature", 0):
        raise Refused("one greedy answer is all there is here: n 1, temperature 0")
    if not body.get("stream"):
        raise Refused("answers are streamed here: stream true")
    if len(prompt) + num_new > max_length:
        raise Refused(f"{len(prompt)} + {num_new} tokens do not fit into {max_length}")
    return Asked(prompt, num_new)


def frames(asked: Asked) -> Iterator[bytes]:
    """The events of one answer."""
    num_sent = 0
    while num_sent < asked.num_new:
        tokens = asked.news.get()
        if tokens is None:
            yield event({"error": {"message": "the library has ended this answer early"}})
            return
        num_sent += len(tokens)
        yield event({"choices": [{"index": 0, "text": "".join(f" {each}" for each in tokens)}]})
    usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": num_sent}
    yield event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class Handler(BaseHTTPRequestHandler):
    """One connection, in a thread of its own. An answer ends with the connection."""

    server: Server

    def do_GET(self) -> None:
        library = self.server.runner.library
        if self.path == "/health":
            self._json(200, {"status": "ok"})
        elif self.path == "/v1/models":
            model = {"id": library.model, "max_model_len": library.max_length}
            self._json(200, {"data": [model]})
        else:
            self._json(404, {"error": {"message": f"there is no {self.path}"}})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path != "/v1/completions":
            self._json(404, {"error": {"message": f"there is no {self.path}"}})
            return
        try:
            asked = parse(json.loads(content), self.server.runner.library.max_length)
        except ValueError as error:
            self._json(400, {"error": {"message": str(error)}})
            return
        self.server.runner.submit(asked)
        try:
            self._stream(asked)
        except OSError:
            asked.is_left = True

    def _stream(self, asked: Asked) -> None:
        events = frames(asked)
        first = next(events)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(first)
        for each in events:
            self.wfile.write(each)

    def _json(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """A line a request would cost time."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, port: int, runner: Runner) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.runner = runner


def serve(library: Library, port: int) -> None:
    """Until the process is ended."""
    runner = Runner(library)
    server = Server(port, runner)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    runner.run_forever()
