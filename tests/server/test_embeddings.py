"""POST /v1/embeddings: the forms of input and output, refusals, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fastapi import FastAPI

from server import limits
from server.app import create_app
from server.encoder_tokenizer import EncoderTokenizer
from server.engine_state import EngineState
from server.errors import EngineUnavailable, GenerationFailed, QueueFull
from server.http_settings import HttpSettings
from server.model_registry import ServedModels
from tests.server.embedder import (
    CLS,
    SEP,
    A,
    B,
    C,
    FakeEmbeddingEngine,
    app_with_both,
    embedder,
    vectors_of,
    word_tokenizer,
)
from tests.server.http_client import chat, complete, error_of, listening, post, send


@pytest.fixture
def app() -> FastAPI:
    return app_with_both()


def embed(app: FastAPI, value: Any, **fields: Any) -> httpx.Response:
    return post(app, "/v1/embeddings", {"input": value, **fields})


def vectors(response: httpx.Response) -> list[list[float]]:
    """The vectors in order, checked for OpenAI's shape."""
    assert response.status_code == 200, response.text
    body = response.json()
    assert body.keys() == {"object", "data", "model", "usage"}
    assert (body["object"], body["model"]) == ("list", "counts")
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    assert {item["object"] for item in body["data"]} == {"embedding"}
    return [item["embedding"] for item in body["data"]]


@pytest.mark.parametrize(
    ("value", "token_ids"),
    [
        ("a b", [[CLS, A, B, SEP]]),
        (["a", "b c"], [[CLS, A, SEP], [CLS, B, C, SEP]]),
        ([A, B], [[A, B]]),
        ([[A], [B, C]], [[A], [B, C]]),
        (["a"], [[CLS, A, SEP]]),
    ],
)
def test_every_form_of_input_gives_a_vector_per_text(
    app: FastAPI, value: Any, token_ids: list[list[int]]
) -> None:
    response = embed(app, value)
    np.testing.assert_allclose(vectors(response), vectors_of(token_ids), atol=1e-6)
    num_tokens = sum(map(len, token_ids))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert response.json()["usage"] == usage
    assert response.headers["x-hexlm-device"] == "cpu"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "and not empty"),
        ("", "'input' is an empty string"),
        (["a", ""], "'input[1]' is an empty string"),
        (["a", 5], "'input[1]' must be a string"),
        ([5, "a"], "must be a list of token ids"),
        ([[5], "a"], "'input[1]' must be a list of token ids"),
        (["a", [5]], "'input[1]' must be a string"),
        ([[5], []], "'input[1]' must be a list of token ids"),
        ([[]], "'input[0]' must be a list of token ids"),
        ([True], "must be a list of token ids"),
        ([-1], "must be a list of token ids"),
        ([4, 1.5], "must be a list of token ids"),
        ([8], "holds the token id 8; this model has ids from 0 to 7"),
        ([[4], [10**30]], "'input[1]' holds the token id"),
        ({"text": "a"}, "must be a string, a list of strings"),
        (7, "must be a string, a list of strings"),
        (["a"] * 2049, "may hold 2048 texts; it holds 2049"),
    ],
)
def test_inputs_that_are_none_are_refused(app: FastAPI, value: Any, said: str) -> None:
    response = embed(app, value)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "input")
    assert said in error["message"]


def test_input_is_required(app: FastAPI) -> None:
    for body in ({}, {"input": None}):
        assert error_of(post(app, "/v1/embeddings", body))["param"] == "input"


def test_base64_is_of_little_endian_float32_and_float_is_the_default(app: FastAPI) -> None:
    (text,) = vectors(embed(app, "a b", encoding_format="base64"))
    decoded = np.frombuffer(base64.b64decode(str(text)), "<f4")
    (default,) = vectors(embed(app, "a b"))
    (numbers,) = vectors(embed(app, "a b", encoding_format="float"))
    assert numbers == default
    # Nine digits give the very same float32 back.
    np.testing.assert_array_equal(np.array(numbers, np.float32), decoded)
    assert len(numbers) == 4


def test_dimensions_shorten_and_normalize_again(app: FastAPI) -> None:
    (vector,) = vectors(embed(app, "a b b", dimensions=2))
    np.testing.assert_allclose(vector, np.array([1.0, 2.0]) / np.sqrt(5), atol=1e-6)
    assert vectors(embed(app, "a", dimensions=4)) == vectors(embed(app, "a"))
    # Nothing is left of this one but zeros; that is no reason to divide by zero.
    assert vectors(embed(app, "d", dimensions=3)) == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoding_format", "md5"),
        ("encoding_format", 5),
        ("dimensions", 0),
        ("dimensions", -1),
        ("dimensions", 5),
        ("dimensions", 10**6),
        ("dimensions", 1.5),
        ("dimensions", "2"),
        ("dimensions", True),
        ("truncate_prompt_tokens", 2),
        ("truncate_prompt_tokens", 17),
        ("truncate_prompt_tokens", -2),
        ("normalize", False),
        ("add_special_tokens", False),
        ("messages", [{"role": "user", "content": "a"}]),
        ("late_chunking", True),
    ],
)
def test_values_that_cannot_be_done_are_refused_by_name(
    app: FastAPI, field: str, value: Any
) -> None:
    response = embed(app, "x", **{field: value})
    assert (response.status_code, error_of(response)["param"]) == (400, field)


def test_nulls_neutral_values_and_unknown_fields_are_accepted(app: FastAPI) -> None:
    extra = {"user": "u", "dimensions": None, "encoding_format": None, "whatever": 1}
    neutral = {"normalize": True, "add_special_tokens": True, "late_chunking": False}
    assert len(vectors(embed(app, "a", **extra, **neutral))) == 1


def test_an_overlong_text_is_refused_with_the_counts(app: FastAPI) -> None:
    response = embed(app, ["a", "a " * 15])
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (
        400, "context_length_exceeded", "input",
    )  # fmt: skip
    assert error["message"].startswith(
        "This model's maximum context length is 16 tokens. However, 'input[1]' resulted in 17"
    )
    assert error_of(embed(app, [4] * 17))["code"] == "context_length_exceeded"


def test_truncation_keeps_the_beginning_and_the_special_tokens() -> None:
    engine = FakeEmbeddingEngine()
    app = app_with_both(engine)
    vectors(embed(app, ["a b c d", "a"], truncate_prompt_tokens=4))
    vectors(embed(app, [[A, B, C]], truncate_prompt_tokens=3))
    vectors(embed(app, "a " * 40, truncate_prompt_tokens=-1))
    assert [request.inputs for request in engine.requests] == [
        ((CLS, A, B, SEP), (CLS, A, SEP)),
        ((A, B, C),),
        ((CLS, *[A] * 14, SEP),),
    ]


def test_text_that_spells_a_special_token_forges_none() -> None:
    ids = word_tokenizer().encode("a[SEP]b")
    assert ids.count(SEP) == 1
    assert isinstance(word_tokenizer(), EncoderTokenizer)


def test_a_request_has_a_limit_of_tokens(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.embedding_inputs.MAX_EMBEDDING_TOKENS", 6)
    assert len(vectors(embed(app, ["a", "b"]))) == 2
    error = error_of(embed(app, ["a", "b c"]))
    assert "more than 6 tokens in all; the limit is passed at 'input[1]'" in error["message"]
    assert limits.MAX_QUEUED_EMBEDDING_TOKENS >= limits.MAX_EMBEDDING_TOKENS


def test_a_model_that_writes_gives_no_embeddings_and_the_other_way_round(app: FastAPI) -> None:
    response = embed(app, "a", model="writer")
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "model")
    assert error["message"].endswith("Embedding models served here: counts.")
    for answer in (chat(app, model="counts"), complete(app, model="counts")):
        error = error_of(answer)
        assert (answer.status_code, error["param"]) == (400, "model")
        assert error["message"].startswith("The model 'counts' is an embedding model")
        assert error["message"].endswith("Models that can: writer.")


def test_models_are_found_by_name_and_alias_and_by_default(app: FastAPI) -> None:
    assert vectors(embed(app, "a", model="text-embedding-3-small")) == vectors(embed(app, "a"))
    response = embed(app, "a", model="other")
    assert response.status_code == 404
    assert error_of(response)["message"].endswith("Models served here: writer, counts.")


def test_the_list_of_models_tells_their_kinds(app: FastAPI) -> None:
    data = send(app, "GET", "/v1/models").json()["data"]
    assert [(m["id"], m["kind"], m["dimensions"]) for m in data] == [
        ("writer", "generation", None),
        ("counts", "embedding", 4),
    ]
    shown = send(app, "GET", "/v1/models/text-embedding-3-small").json()
    assert shown == data[1]
    assert (shown["max_model_len"], shown["device"], shown["quantization"]) == (16, "cpu", "f32")


def test_health_covers_embedding_models() -> None:
    engine = FakeEmbeddingEngine()
    app = app_with_both(engine)
    assert send(app, "GET", "/health").json()["models"].keys() == {"writer", "counts"}
    engine.state = EngineState.RESTARTING
    assert send(app, "GET", "/health").status_code == 503
    assert send(app, "GET", "/ready").status_code == 200


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (QueueFull("full", 3.0), 429),
        (EngineUnavailable("loading", 3.0), 503),
        (GenerationFailed("it broke", code="embedding_failed"), 500),
    ],
)
def test_what_the_engine_refuses_is_an_http_error(failure: Exception, status: int) -> None:
    engine = FakeEmbeddingEngine()
    engine.failure = failure
    response = embed(app_with_both(engine), "a")
    assert (response.status_code, error_of(response)["message"]) == (status, str(failure))
    assert response.headers.get("retry-after") == ("3" if status != 500 else None)


def test_a_deadline_ends_the_wait_and_the_work() -> None:
    engine = FakeEmbeddingEngine()
    engine.gate = asyncio.Event()
    response = embed(app_with_both(engine, HttpSettings(default_timeout_s=0.05)), "a")
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert engine.num_cancelled == 1


def test_metrics_count_embeddings() -> None:
    app = app_with_both()
    vectors(embed(app, "a"))
    text = send(app, "GET", "/metrics").text
    assert 'hexlm:request_success_total{finished_reason="stop",model_name="counts"} 1.0' in text


def test_openais_client_gets_the_vectors_whatever_format_it_asks_for(app: FastAPI) -> None:
    expected = vectors_of([[CLS, A, SEP], [CLS, B, C, SEP]])
    with listening(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="k") as client:
        for options in ({}, {"encoding_format": "float"}, {"dimensions": 4}):  # {}: base64
            answer = client.embeddings.create(model="counts", input=["a", "b c"], **options)
            got = np.array([item.embedding for item in answer.data])
            np.testing.assert_allclose(got, expected, atol=1e-6)
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7)
        with pytest.raises(openai.BadRequestError, match="'dimensions' is 5"):
            client.embeddings.create(model="counts", input="a", dimensions=5)


def test_a_client_that_leaves_ends_the_work() -> None:
    engine = FakeEmbeddingEngine()
    with listening(app_with_both(engine)) as url:

        async def leave() -> None:
            engine.gate = asyncio.Event()
            async with httpx.AsyncClient() as client:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(
                        f"{url}/v1/embeddings", json={"input": "a"}, timeout=httpx.Timeout(0.3)
                    )
            for _ in range(200):
                if engine.num_cancelled:
                    return
                await asyncio.sleep(0.01)

        asyncio.run(leave())
    assert engine.num_cancelled == 1


@pytest.mark.parametrize(
    ("fields", "ids", "names"),
    [
        ({}, [CLS, A, B, SEP], ["[CLS]", "a", "b", "[SEP]"]),
        ({"add_special_tokens": False}, [A, B], ["a", "b"]),
    ],
    ids=str,
)
def test_tokenize_tells_what_an_encoder_sees(
    fields: dict[str, Any], ids: list[int], names: list[str]
) -> None:
    body = {"model": "counts", "prompt": "a b", "return_token_strs": True, **fields}
    answer = post(app_with_both(), "/tokenize", body).json()
    assert answer == {"count": len(ids), "max_model_len": 16, "tokens": ids, "token_strs": names}
    back = post(app_with_both(), "/detokenize", {"model": "counts", "tokens": ids}).json()
    assert back == {"prompt": " ".join(names)}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [8]}, "tokens"),
    ],
)
def test_tokenize_refuses_what_an_encoder_does_not_take(
    path: str, body: dict[str, Any], param: str
) -> None:
    response = post(app_with_both(), path, {"model": "counts", **body})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_tokenize_without_a_model_asks_the_one_that_writes_or_else_the_encoder() -> None:
    assert post(app_with_both(), "/tokenize", {"prompt": "a"}).json()["tokens"] == [97]
    alone = create_app(ServedModels(embedder()))
    assert post(alone, "/tokenize", {"prompt": "a"}).json()["tokens"] == [CLS, A, SEP]
