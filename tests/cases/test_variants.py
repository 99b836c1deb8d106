"""Every variant of every case, over HTTP on a scripted engine: status, error and time."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from tests.cases.catalogue import Case, Exchange, Names, catalogue, exchange, forced_text
from tests.server.embedder import app_with_both
from tests.server.http_client import app_of, chat, error_of, send
from tests.server.scripted_client import FakeEngine, saying

NAMES = Names("fake/model", embedding_model="counts")
MAX_ERROR_BYTES = 8192
MAX_SECONDS = 1.0


def variants() -> list[object]:
    found = [(case, index) for case in catalogue().values() for index in range(len(case.variants))]
    return [
        pytest.param(case, index, id=f"{case.id}-{index}", marks=pytest.mark.case(case.id))
        for case, index in found
    ]


def scripted(content: bytes) -> tuple[FakeEngine, bytes]:
    """An engine that says what the body forces it to, and the body without that force."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return FakeEngine(saying("hello")), content
    forced = forced_text(body) if isinstance(body, dict) else None
    if forced is None:
        return FakeEngine(saying("hello")), content
    return FakeEngine(saying(forced)), json.dumps(body).encode()


def assert_refused(response: httpx.Response, wanted: Exchange) -> None:
    assert len(response.content) < MAX_ERROR_BYTES
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if wanted.param is not None:
        assert (error["param"] or "").startswith(wanted.param)


@pytest.mark.parametrize(("case", "index"), variants())
def test_a_variant_gets_its_status_at_once_and_the_next_request_is_served(
    case: Case, index: int
) -> None:
    wanted = exchange(case, index, NAMES)
    engine, content = scripted(wanted.content)
    app = app_with_both() if case.area == "embeddings" else app_of(engine)
    began_s = time.process_time()
    response = send(app, wanted.method, wanted.path, content=content, headers=wanted.headers)
    assert time.process_time() - began_s < MAX_SECONDS
    assert response.status_code == wanted.status, response.text[:500]
    if wanted.status != 200:
        assert_refused(response, wanted)
        assert engine.requests == []
    assert engine.running == set()
    assert chat(app, max_tokens=1).status_code == 200
