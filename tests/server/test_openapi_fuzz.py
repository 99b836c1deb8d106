"""Bodies made from our own OpenAPI document, right and wrong ones: none may be our fault (5xx)."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.generation import GenerationMode

from server.app import create_app
from server.model_registry import ServedModels
from tests.server.embedder import embedder
from tests.server.http_client import send
from tests.server.scripted_client import FakeEngine, saying, served

WRITER = served(FakeEngine(saying("hello 😀"), tokens_per_step=64), name="writer")
APP = create_app(ServedModels(WRITER, embedder()))
DOCUMENT: dict[str, Any] = APP.openapi()
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
BODIES = [(path, method) for path, method in OPERATIONS if method == "post" and "{" not in path]

SETTINGS = hypothesis.settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)


@pytest.mark.parametrize(("path", "method"), BODIES)
def test_every_route_that_reads_a_body_describes_it(path: str, method: str) -> None:
    body = DOCUMENT["paths"][path][method]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert schema["type"] == "object"
    assert len(schema["properties"]) >= 2
    assert "$ref" not in json.dumps(schema)


def statuses(path: str, method: str, mode: GenerationMode) -> list[int]:
    """What the application answered to requests made from the document."""
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]
    answers: list[int] = []

    @SETTINGS
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # A made-up name is a 404 before anything else is read.
        request = case.as_transport_kwargs(base_url="http://localhost")
        options = {name: request.get(name) for name in ("json", "params", "headers")}
        options["content"] = request.get("data")
        response = send(APP, request["method"], request["url"], **options)
        assert response.status_code < 500, (request, response.text)
        answers.append(response.status_code)

    ask()
    return answers


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_the_document_allows_is_no_server_error(path: str, method: str) -> None:
    answers = statuses(path, method, GenerationMode.POSITIVE)
    assert 200 in answers or "{" in path


@pytest.mark.parametrize(("path", "method"), BODIES)
def test_what_the_document_forbids_is_the_callers_fault(path: str, method: str) -> None:
    assert 400 in statuses(path, method, GenerationMode.NEGATIVE)
