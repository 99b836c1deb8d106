"""The openai client's responses against the real model, engine process and all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from engine.bundle import Bundle
from server.app import create_app
from server.config import load_config
from server.loadable_model import from_bundle
from server.metrics import Metrics
from server.models import ModelManager, client_policy
from tests.server.http_client import listening

pytestmark = pytest.mark.model


def app_serving(bundle: Bundle) -> FastAPI:
    """Its lifespan is that of the engine process."""
    config = load_config(flags={"kv_memory": "64MiB", "threads": "2"})
    metrics = Metrics()
    manager = ModelManager(client_policy(config), metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        manager.load(from_bundle(bundle.path, config))
        await manager.wait_settled()
        try:
            yield
        finally:
            await manager.stop()

    return create_app(manager, metrics=metrics, lifespan=lifespan)


@pytest.fixture(scope="module")
def client(real_bundle: Bundle) -> Iterator[openai.OpenAI]:
    with (
        listening(app_serving(real_bundle)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        yield client


def test_a_conversation_is_streamed_continued_and_retrieved(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": 48}
    question = "Answer with one word: what is the capital of France?"
    with client.responses.stream(**asked, input=question) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        first = stream.get_final_response()
    assert "Paris" in first.output_text == "".join(deltas)
    second = client.responses.create(**asked, input="Say it.", previous_response_id=first.id)
    assert second.usage is not None
    # Blocks of 16 tokens: the second prompt begins with the first one and its answer.
    assert second.usage.input_tokens_details.cached_tokens >= 32
    assert client.responses.retrieve(second.id).output_text == second.output_text


JOKE = {
    "type": "object",
    "properties": {
        "setup": {"type": "string", "description": "question to set up a joke"},
        "punchline": {"type": "string", "description": "answer to resolve the joke"},
    },
    "required": ["setup", "punchline"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "only enforced"])
def test_a_greedy_model_ends_a_document_whose_strings_have_no_bound(
    client: openai.OpenAI, is_told: bool
) -> None:
    named: Any = {"type": "json_schema", "json_schema": {"name": "joke", "schema": JOKE}}
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Tell me a joke about cats."}],
        temperature=0,
        max_tokens=400,
        **({"response_format": named} if is_told else {"extra_body": {"guided_json": JOKE}}),
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    joke = json.loads(choice.message.content or "")
    assert joke["setup"] and joke["punchline"]
