"""The small real model on the NPU lane, over HTTP, in the HTP emulator: once, and short.

A step takes the emulator half a minute of computing, so the answer has three tokens. What the CPU
answers to the same is not far in its numbers, and the same in its words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.bundle import Bundle
from tests.cases.real_server import CHAT, RealServer, real_server

pytestmark = [pytest.mark.model, pytest.mark.npu]

QUESTION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    "max_tokens": 3,
    "temperature": 0,
}
CONFIG = """
[engine]
stall_timeout_s = 1800.0
"""


def ask(server: RealServer) -> tuple[str, str, dict[str, int]]:
    """(the answer, what computed it, the usage)."""
    response = server.http.post(CHAT, json=QUESTION, timeout=1800)
    assert response.status_code == 200, response.text
    body = response.json()
    text: str = body["choices"][0]["message"]["content"]
    return text, response.headers["x-hexlm-device"], body["usage"]


def test_it_answers_as_the_cpu_does(real_bundle: Bundle, emulator: None, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text(CONFIG)
    with real_server(tmp_path, "--device", "cpu", "--threads", "1") as server:
        expected, device, _ = ask(server)
        assert device == "cpu"
    with real_server(
        tmp_path, "--device", "npu-emulated", "--threads", "1", "--config", str(config)
    ) as server:
        found, device, usage = ask(server)
        health = server.health()
    assert found == expected != ""
    assert device == "npu-emulated"
    assert usage["prompt_tokens"] <= 32 and usage["completion_tokens"] == 3
    assert health["engine"]["device"] == "npu-emulated"
    assert health["total_failed_steps"] == 0
