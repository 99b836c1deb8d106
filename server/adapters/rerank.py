"""Vectors to the answer of /v1/rerank, in the shape that Jina's, Cohere's and vLLM's clients read.

The models served here embed query and documents apart (bi-encoders), so the score of a document
is the cosine of the angle between its vector and the query's: from -1 to 1, higher is nearer.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from server.embedding_protocol import RerankBody
from server.served_embedder import Float32Array, ServedEmbedder


def rerank_body(
    vectors: Float32Array,
    documents: Sequence[str],
    body: RerankBody,
    model: ServedEmbedder,
    num_tokens: int,
) -> dict[str, Any]:
    """`vectors` [1 + documents, D] of length 1, the query's first. Equal scores keep their order;
    a `top_n` above the number of documents asks for all of them."""
    scores = vectors[1:] @ vectors[0]
    order = np.argsort(-scores, kind="stable")[: body.top_n]
    results: list[dict[str, Any]] = []
    for index in map(int, order):
        score = min(1.0, max(-1.0, float(scores[index])))
        results.append({"index": index, "relevance_score": score})
        if body.return_documents:
            results[-1]["document"] = {"text": documents[index]}
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": model.name,
        "results": results,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
