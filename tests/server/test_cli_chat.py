"""`hexlm chat` against a small HTTP server: streaming, history, Ctrl-C, one-line errors."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from server.cli.chat import Conversation, Talk
from server.cli.chat_client import ChatClient, ChatError, ChatOptions
from server.cli.main import run


class FakeServer(ThreadingHTTPServer):
    """Answers every chat with `deltas`, or with `status` and `error`; keeps the bodies it got."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.deltas: list[dict[str, Any]] = [{"content": "Hel"}, {"content": "lo"}]
        self.last_event: dict[str, Any] | None = None
        self.status = 200
        self.error = ""
        self.retry_after: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.authorization: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.server.authorization = self.headers["authorization"]
        self._send(200, "application/json", json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.server.bodies.append(json.loads(self.rfile.read(length)))
        if self.server.status != 200:
            error = {"error": {"message": self.server.error}}
            self._send(self.server.status, "application/json", json.dumps(error))
            return
        events = [{"choices": [{"delta": delta}]} for delta in self.server.deltas]
        events += [self.server.last_event] if self.server.last_event else []
        lines = [": keep-alive", *(f"data: {json.dumps(event)}" for event in events)]
        self._send(200, "text/event-stream", "\n\n".join([*lines, "data: [DONE]", ""]))

    def _send(self, status: int, content_type: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        if self.server.retry_after:
            self.send_header("retry-after", self.server.retry_after)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def roles(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_a_prompt_is_answered_once_and_the_options_are_sent(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch)
    options = ["--temperature", "0.5", "--max-tokens", "7", "--system", "Be brief."]
    assert run(["chat", "Hi", "--url", server.url + "/v1", "--api-key", "secret", *options]) == 0
    assert capsys.readouterr().out == "Hello\n"
    (body,) = server.bodies
    assert (body["model"], body["stream"]) == ("tiny", True)
    assert (body["temperature"], body["max_tokens"]) == (0.5, 7)
    assert roles(body) == [("system", "Be brief."), ("user", "Hi")]
    assert server.authorization == "Bearer secret"


def test_piped_text_follows_the_prompt(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "a long text\n")
    assert run(["chat", "Summarize:", "--url", server.url, "--model", "other"]) == 0
    assert roles(server.bodies[0]) == [("user", "Summarize:\n\na long text\n")]
    assert server.bodies[0]["model"] == "other"
    assert capsys.readouterr().out == "Hello\n"


def test_empty_piped_text_without_a_prompt_is_an_error(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, " \n")
    assert run(["chat", "--url", server.url]) == 1
    assert "nothing to ask" in capsys.readouterr().err


def test_a_conversation_keeps_its_history_until_reset(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "one", "", "two", "/help", "/reset", "three", "/exit", "four")
    assert run(["chat", "--url", server.url, "--system", "S"]) == 0
    assert [roles(body) for body in server.bodies] == [
        [("system", "S"), ("user", "one")],
        [("system", "S"), ("user", "one"), ("assistant", "Hello"), ("user", "two")],
        [("system", "S"), ("user", "three")],
    ]


def test_the_end_of_input_ends_the_program(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "one")
    assert run(["chat", "--url", server.url]) == 0
    assert len(server.bodies) == 1


def test_an_error_ends_the_answer_and_not_the_conversation(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.last_event = {"error": {"message": "The engine\nfailed."}}
    type_lines(monkeypatch, "one", "two")
    assert run(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out.count("error: The engine failed.") == 2
    # What had been said before the error is part of the history.
    assert roles(server.bodies[1]) == [("user", "one"), ("assistant", "Hello"), ("user", "two")]


def test_a_missing_server_is_one_line_that_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch)
    assert run(["chat", "Hi", "--url", "http://127.0.0.1:9"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "hexlm: no server answers at http://127.0.0.1:9; start one with `hexlm serve`, "
        "or name another with --url\n"
    )


@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [
        (503, "5", "The model is loading. Try again in 5 s."),
        (401, None, "The model is loading. Give the key with --api-key."),
        (400, None, "The model is loading."),
    ],
)
def test_http_errors_show_the_servers_message(
    server: FakeServer, status: int, retry_after: str | None, expected: str
) -> None:
    server.status, server.retry_after, server.error = status, retry_after, "The model is\nloading."
    client = ChatClient(server.url)
    with pytest.raises(ChatError) as caught:
        list(client.stream([{"role": "user", "content": "Hi"}], ChatOptions("tiny")))
    client.close()
    assert str(caught.value) == expected


class StoppedClient(ChatClient):
    """The user presses Ctrl-C after the first piece."""

    def stream(self, messages: Any, options: ChatOptions) -> Any:
        pieces = super().stream(messages, options)
        yield next(pieces)
        pieces.close()
        raise KeyboardInterrupt


def test_ctrl_c_stops_the_answer_and_keeps_its_part(server: FakeServer) -> None:
    screen = io.StringIO()
    client = StoppedClient(server.url)
    conversation = Conversation()
    talk = Talk(client, ChatOptions("tiny"), conversation, Console(file=screen))
    talk.once("Hi")
    client.close()
    assert screen.getvalue() == "Hel (stopped)\n"
    assert [m["content"] for m in conversation.messages] == ["Hi", "Hel"]


def test_an_answer_cannot_drive_the_terminal_and_thoughts_are_not_kept(
    server: FakeServer,
) -> None:
    server.deltas = [
        {"reasoning_content": "hm "},
        {"content": "\x1b[2Ja\x07b\x9b\tc\n"},
        {"content": None},
    ]
    screen = io.StringIO()
    client = ChatClient(server.url)
    conversation = Conversation()
    Talk(client, ChatOptions("tiny"), conversation, Console(file=screen)).once("Hi")
    client.close()
    assert screen.getvalue().replace(" ", "") == "hm[2Jabc\n\n"
    assert conversation.messages[-1]["content"] == "\x1b[2Ja\x07b\x9b\tc\n"


def test_an_unanswered_question_is_taken_back() -> None:
    conversation = Conversation("S")
    conversation.ask("one")
    conversation.answer("")
    assert [m["role"] for m in conversation.messages] == ["system"]
