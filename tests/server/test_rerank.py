"""POST /v1/rerank: order, shape and refusals."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.app import create_app
from server.model_registry import ServedModels
from tests.server.embedder import (
    CLS,
    SEP,
    A,
    B,
    C,
    FakeEmbeddingEngine,
    app_with_both,
    cross_encoder,
    embedder,
    vectors_of,
)
from tests.server.http_client import error_of, post, send

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
        ({"model": "writer"}, "model", "cannot rank documents"),
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


def app_with_cross_encoder(engine: FakeEmbeddingEngine | None = None) -> FastAPI:
    """Behind an embedding model, which does not rank if nobody asks it to."""
    return create_app(ServedModels(embedder(), cross_encoder(engine)))


def test_a_cross_encoder_reads_the_query_with_each_document() -> None:
    engine = FakeEmbeddingEngine(gives_logits=True)
    response = rerank(app_with_cross_encoder(engine), documents=["c", "a b", "b"])
    assert [request.inputs for request in engine.requests] == [
        ((CLS, A, B, SEP, C, SEP), (CLS, A, B, SEP, A, B, SEP), (CLS, A, B, SEP, B, SEP)),
    ]
    assert order(response) == [1, 2, 0]
    body = response.json()
    assert (body["model"], body["usage"]["total_tokens"]) == ("pairs", 6 + 7 + 6)
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == pytest.approx([1 / (1 + math.exp(-n)) for n in (4, 3, 2)])


def test_a_document_is_cut_for_a_cross_encoder_and_a_query_never_is() -> None:
    engine = FakeEmbeddingEngine(gives_logits=True)
    app = app_with_cross_encoder(engine)
    long: dict[str, Any] = {"documents": ["c " * 40]}
    assert (
        "the query with 'documents[0]' resulted in 45 tokens"
        in (error_of(rerank(app, **long))["message"])
    )
    assert rerank(app, **long, truncate_prompt_tokens=8).status_code == 200
    assert engine.requests[-1].inputs == ((CLS, A, B, SEP, C, C, C, SEP),)
    refused = rerank(app, query="a " * 40, documents=["c"], truncate_prompt_tokens=-1)
    assert error_of(refused)["code"] == "context_length_exceeded"


def test_a_cross_encoder_gives_no_embeddings_and_says_what_it_is() -> None:
    app = app_with_cross_encoder()
    refused = error_of(post(app, "/v1/embeddings", {"model": "pairs", "input": "a"}))
    assert "scores documents for a query and gives no embeddings" in refused["message"]
    chat = {"model": "pairs", "messages": [{"role": "user", "content": "a"}]}
    assert "is a cross-encoder" in error_of(post(app, "/v1/chat/completions", chat))["message"]
    listed = send(app, "GET", "/v1/models/pairs").json()
    assert (listed["kind"], listed["dimensions"]) == ("rerank", None)
    assert rerank(app, model="counts").json()["model"] == "counts"
    assert post(app, "/v1/embeddings", {"input": "a"}).json()["model"] == "counts"
