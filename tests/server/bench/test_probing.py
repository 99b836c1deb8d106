"""How a server wants to be asked is found out by asking; a useless one is refused in one line."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.bench.dialect import PromptKind
from server.bench.errors import BenchError
from server.bench.probing import probe
from server.bench.target import Target
from server.bench.workloads import TokenRange
from tests.server.bench.scripted_server import ScriptedServer, run_virtual


def probed(server: ScriptedServer, model: str | None = None) -> Target:
    async def job() -> Target:
        return await probe("peer", server.client(), model)

    return run_virtual(job)


def test_hexlm_is_known_by_what_it_says() -> None:
    info = probed(ScriptedServer(is_hexlm=True)).info
    assert (info.is_hexlm, info.model, info.max_model_len, info.block_size) == (
        *(True, "small", 1024, 16),
    )
    assert info.facts == {"device": "cpu", "kv_format": "int8"}


def test_any_other_server_is_one_that_speaks_openais_format() -> None:
    target = probed(ScriptedServer())
    assert target.info.kind == "OpenAI-compatible"
    assert target.info.max_model_len == 1024
    assert target.dialect.kind is PromptKind.TOKEN_IDS


def test_a_small_vocabulary_gets_small_ids() -> None:
    def has_large_id(body: dict[str, Any]) -> bool:
        return any(token_id >= 3000 for token_id in body.get("prompt", ()))

    target = probed(ScriptedServer(refuses=has_large_id))
    assert target.dialect.tokens == TokenRange(300, 3_000)


def test_a_server_without_ignore_eos_is_asked_without() -> None:
    target = probed(ScriptedServer(refuses=lambda body: "ignore_eos" in body))
    assert target.dialect.kind is PromptKind.TOKEN_IDS
    assert target.dialect.knows_ignore_eos is False


def test_a_server_of_texts_gets_words_and_their_length_is_learned() -> None:
    target = probed(ScriptedServer(refuses=lambda body: isinstance(body.get("prompt"), list)))
    assert target.dialect.kind is PromptKind.TEXT
    assert target.dialect.words_per_token == 1.0
    chat_only = probed(ScriptedServer(refuses=lambda body: "prompt" in body))
    assert chat_only.dialect.path == "/v1/chat/completions"


def test_a_server_that_refuses_everything_is_of_no_use() -> None:
    with pytest.raises(BenchError, match="HTTP 400.*this is not understood"):
        probed(ScriptedServer(refuses=lambda body: True))


def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    with pytest.raises(BenchError, match=r"does not serve large; it has \['small'\]"):
        probed(ScriptedServer(), "large")


def test_nobody_there_is_said() -> None:
    with pytest.raises(BenchError, match="nobody answers|answers none"):
        probed(ScriptedServer(fails_after=0))


def test_a_server_of_something_else_is_refused() -> None:
    async def job() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
        await probe("server", httpx.AsyncClient(transport=transport, base_url="http://x"), None)

    with pytest.raises(BenchError, match="/v1/models is no list of models"):
        run_virtual(job)
