"""POST /v1/rerank: order, shape and refusals."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.embedder import CLS, SEP, A, B, FakeEmbeddingEngine, app_with_both, vectors_of
from tests.server.http_client import error_of, post

DOCUMENTS = ["c c c", {"text": "a a b"}, "b", {"text": "a b", "title": "ignored"}]


@pytest.fixture
def app() -> FastAPI:
    return app_with_both()


def rerank(app: FastAPI, path: str = "/v1/rerank", **fields: Any) -> httpx.Response:
    return post(app, path, {"query": "a b", "documents": DOCUMENTS, **fields})


def order(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    scores = [result["relevance_score"] for result in response.json()["results"]]
    assert scores == sorted(scores, reverse=True)
    return [result["index"] for result in response.json()["results"]]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_back_nearest_first(app: FastAPI, path: str) -> None:
    response = rerank(app, path)
    assert order(response) == [3, 1, 2, 0]
    body = response.json()
    assert body.keys() == {"id", "object", "model", "results", "usage"}
    assert body["results"][0].keys() == {"index", "relevance_score"}
    assert body["usage"] == {"prompt_tokens": 21, "total_tokens": 21}


def test_the_score_is_the_cosine(app: FastAPI) -> None:
    result = rerank(app, documents=["b"]).json()["results"][0]
    query, document = vectors_of([[CLS, A, B, SEP], [CLS, B, SEP]])
    assert result["relevance_score"] == pytest.approx(float(query @ document), abs=1e-6)
    assert rerank(app, documents=["a b"]).json()["results"][0]["relevance_score"] <= 1.0


def test_top_n_cuts_and_may_be_larger_than_the_list(app: FastAPI) -> None:
    assert order(rerank(app, top_n=2)) == [3, 1]
    assert order(rerank(app, top_n=100)) == [3, 1, 2, 0]


def test_documents_are_returned_on_demand_as_text(app: FastAPI) -> None:
    results = rerank(app, return_documents=True, top_n=2).json()["results"]
    assert [result["document"] for result in results] == [{"text": "a b"}, {"text": "a a b"}]


def test_equal_documents_keep_their_order(app: FastAPI) -> None:
    assert order(rerank(app, documents=["c", "a b", "a b", "c"])) == [1, 2, 0, 3]


def test_query_and_documents_are_embedded_in_one_request() -> None:
    engine = FakeEmbeddingEngine()
    rerank(app_with_both(engine), documents=["a"])
    assert [request.inputs for request in engine.requests] == [
        ((CLS, A, B, SEP), (CLS, A, SEP)),
    ]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"query": ""}, "query", "query"),
        ({"query": None}, "query", "required"),
        ({"query": ["a"]}, "query", "string"),
        ({"documents": []}, "documents", "and not empty"),
        ({"documents": "a"}, "documents", "must be a list"),
        ({"documents": ["a", ""]}, "documents", "'documents[1]' is an empty string"),
        ({"documents": ["a", 5]}, "documents", "'documents[1]' must be a string or an object"),
        ({"documents": [{"body": "a"}]}, "documents", "'documents[0]' must be a string or an"),
        ({"documents": ["a"] * 2049}, "documents", "may hold 2048"),
        ({"documents": ["a " * 20]}, "documents", "'documents[0]' resulted in 22 tokens"),
        ({"query": "a " * 20}, "query", "'query' resulted in 22 tokens"),
        ({"top_n": 0}, "top_n", "greater than or equal to 1"),
        ({"top_n": "2"}, "top_n", "integer"),
        ({"rank_fields": ["title"]}, "rank_fields", "field 'text'"),
        ({"model": "writer"}, "model", "gives no embeddings"),
    ],
)
def test_what_cannot_be_done_is_refused(
    app: FastAPI, fields: dict[str, Any], param: str, said: str
) -> None:
    response = rerank(app, **fields)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert said in error["message"]


def test_long_documents_can_be_cut(app: FastAPI) -> None:
    response = rerank(app, documents=["a " * 20, "b"], truncate_prompt_tokens=-1)
    assert sorted(order(response)) == [0, 1]
