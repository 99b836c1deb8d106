"""A real server process with open streams: signals, engine death, loading, and no orphans."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="POSIX signals; Windows has no way to send them to a child"
)

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Server:
    """A child that runs `serve_letters`, and a client of it."""

    process: subprocess.Popen[str]
    http: httpx.Client

    def engines(self) -> list[psutil.Process]:
        """The engine processes (not Python's resource tracker, which ends with the server)."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def wait_for(self, path: str, status: int, within_s: float = 15.0) -> httpx.Response:
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            try:
                response = self.http.get(path)
                if response.status_code == status:
                    return response
            except httpx.ConnectError:
                assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        raise AssertionError(f"{path} did not answer {status} within {within_s} s")

    def wait_for_work(self, running: int, waiting: int = 0, within_s: float = 10.0) -> None:
        """Wait until that many sequences run and wait in the engine."""
        wanted, deadline_s = (running, waiting), time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            health = self.http.get("/health").json()["models"]["letters"]
            if (health["num_running"], health["num_waiting"]) == wanted:
                return
            time.sleep(0.01)
        raise AssertionError(f"not {wanted} running and waiting within {within_s} s")

    def chat(self, max_tokens: int, stream: bool = False) -> httpx.Response:
        """The response, read to its end."""
        body = {
            "model": "letters",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }
        return self.http.post("/v1/chat/completions", json=body)

    def finish(self, within_s: float) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=within_s)
        return self.process.returncode, out, err


@contextmanager
def serving(step_s: float = 0.0, load_s: float = 0.0, **flags: Any) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    arguments = [json.dumps({"port": port, **flags}), str(step_s), str(load_s)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.serve_letters", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)
    try:
        yield Server(process, client)
    finally:
        client.close()
        process.kill()
        process.communicate()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def text_of(response: httpx.Response) -> str:
    deltas = [c["delta"] for event in events(response) for c in event.get("choices", [])]
    return "".join(delta.get("content") or "" for delta in deltas)


def errors_of(response: httpx.Response) -> list[str]:
    return [event["error"]["message"] for event in events(response) if "error" in event]


def assert_gone(engines: list[psutil.Process], within_s: float = 1.0) -> None:
    """Ended; a container's init may leave an adopted process as a zombie."""
    assert engines
    deadline_s = time.monotonic() + within_s
    while any(is_running(engine) for engine in engines):
        assert time.monotonic() < deadline_s, f"{engines} still run"
        time.sleep(0.02)


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_sigterm_lets_running_answers_finish_and_refuses_new_ones() -> None:
    with serving(step_s=0.02, drain_timeout_s=10) as server, ThreadPoolExecutor(8) as pool:
        server.wait_for("/ready", 200)
        engines = server.engines()
        streams = [pool.submit(server.chat, 60, True) for _ in range(3)]
        whole = pool.submit(server.chat, 60)
        server.wait_for_work(running=4)
        server.process.send_signal(signal.SIGTERM)
        refused = server.wait_for("/ready", 503)
        late = server.chat(1)
        assert (late.status_code, "shutting down" in late.text) == (503, True)
        assert int(late.headers["retry-after"]) >= 1
        assert "draining" in refused.text
        assert [len(text_of(stream.result())) for stream in streams] == [60, 60, 60]
        assert whole.result().json()["usage"]["completion_tokens"] == 60
        code, out, _ = server.finish(within_s=3)
        assert code == 0
        assert "ready  http://127.0.0.1" in out
        assert_gone(engines)


def test_streams_that_outlast_the_drain_end_with_an_error_event_in_bounded_time() -> None:
    with serving(step_s=0.02, drain_timeout_s=0.5) as server, ThreadPoolExecutor(8) as pool:
        server.wait_for("/ready", 200)
        engines = server.engines()
        # Four have seats, two wait in the queue.
        streams = [pool.submit(server.chat, 1500, True) for _ in range(6)]
        server.wait_for_work(running=4, waiting=2)
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        code, _, err = server.finish(within_s=4)
        assert time.monotonic() - began_s < 0.5 + 2.0
        assert code == 0, err
        expected = ["The server is shutting down; the answer is incomplete."]
        assert [errors_of(stream.result()) for stream in streams] == [expected] * 6
        assert "Traceback" not in err
        assert_gone(engines)


def test_a_whole_answer_that_outlasts_the_drain_is_a_503_to_be_tried_again() -> None:
    with serving(step_s=0.02, drain_timeout_s=0.5) as server, ThreadPoolExecutor(1) as pool:
        server.wait_for("/ready", 200)
        answer = pool.submit(server.chat, 1500)
        server.wait_for_work(running=1)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 503
        assert int(answer.result().headers["retry-after"]) >= 1
        assert answer.result().json()["error"]["code"] == "engine_unavailable"


def test_a_second_signal_ends_the_server_at_once() -> None:
    with serving(step_s=0.02, drain_timeout_s=30) as server, ThreadPoolExecutor(1) as pool:
        server.wait_for("/ready", 200)
        engines = server.engines()
        stream = pool.submit(server.chat, 1500, True)
        server.wait_for_work(running=1)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("/ready", 503)
        server.process.send_signal(signal.SIGINT)
        code, _, _ = server.finish(within_s=1)
        assert code == 130
        assert isinstance(stream.exception(), httpx.HTTPError)
        assert_gone(engines)


def test_loading_is_visible_and_sigterm_ends_it_quickly() -> None:
    with serving(load_s=60) as server:
        server.wait_for("/live", 200)
        assert "loading" in server.wait_for("/ready", 503).text
        refused = server.chat(1)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        engines = server.engines()
        server.process.send_signal(signal.SIGTERM)
        code, out, _ = server.finish(within_s=2)
        assert code == 0
        assert "ready" not in out
        assert_gone(engines)


def test_a_server_whose_only_model_fails_to_load_exits_with_the_reason_as_last_line() -> None:
    with serving(load_s=-1) as server:
        code, out, err = server.finish(within_s=10)
        assert code == 1
        assert "ready" not in out
        last = err.splitlines()[-1]
        assert last == "hexlm: letters: the bundle is damaged; run `hexlm pull` again"


def test_an_engine_killed_in_the_middle_of_http_streams_changes_no_text() -> None:
    with serving(step_s=0.02) as server, ThreadPoolExecutor(4) as pool:
        server.wait_for("/ready", 200)
        undisturbed = text_of(server.chat(50, True))
        streams = [pool.submit(server.chat, 50, True) for _ in range(3)]
        server.wait_for_work(running=3)
        time.sleep(0.2)
        server.engines()[0].kill()
        assert "restarting" in server.wait_for("/ready", 503).text
        assert [text_of(stream.result()) for stream in streams] == [undisturbed] * 3
        assert len(undisturbed) == 50
        server.wait_for("/ready", 200)


def test_the_engine_does_not_outlive_a_killed_server() -> None:
    with serving() as server:
        server.wait_for("/ready", 200)
        engines = server.engines()
        server.process.kill()
        assert_gone(engines, within_s=6.0)
