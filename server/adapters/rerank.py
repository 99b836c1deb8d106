"""Vectors to the answer of /v1/rerank, in the shape that Jina's, Cohere's and vLLM's clients read.

Of a model that embeds query and documents apart, the score of a document is the cosine of the
angle between its vector and the query's: from -1 to 1. Of a cross-encoder, which reads both
together, it is the logistic function of its logit: from 0 to 1. Higher is nearer.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.embedding_protocol import RerankBody
from server.served_embedder import Float32Array, ServedEmbedder


def cosine_scores(vectors: Float32Array) -> Float32Array:
    """`vectors` [1 + documents, D] of length 1, the query's first."""
    scores: Float32Array = np.clip(vectors[1:] @ vectors[0], -1.0, 1.0)
    return scores


def logistic_scores(logits: Float32Array) -> NDArray[np.float64]:
    """`logits` [documents, 1]; in float64, so that only those above 36 all become 1."""
    with np.errstate(over="ignore"):
        scores: NDArray[np.float64] = 1 / (1 + np.exp(-logits[:, 0].astype(np.float64)))
    return scores


def rerank_body(
    scores: NDArray[np.floating],
    documents: Sequence[str],
    body: RerankBody,
    model: ServedEmbedder,
    num_tokens: int,
) -> dict[str, Any]:
    """`scores` has one of each document. Equal scores keep their order; a `top_n` above the number
    of documents asks for all of them."""
    order = np.argsort(-scores, kind="stable")[: body.top_n]
    results: list[dict[str, Any]] = []
    for index in map(int, order):
        results.append({"index": index, "relevance_score": float(scores[index])})
        if body.return_documents:
            results[-1]["document"] = {"text": documents[index]}
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": model.name,
        "results": results,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
