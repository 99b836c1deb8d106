"""Vectors to the answer of /v1/embeddings: shortened if asked, as numbers or as base64.

A shortened vector is normalized again, so that its length is 1. base64 is of little-endian
float32, which is what OpenAI's clients decode; numbers are written with the nine digits that give
the same float32 back. The text is put together here, since a large answer has 800,000 numbers.
"""

from __future__ import annotations

import base64

import numpy as np

from server.adapters.reply import json_text
from server.errors import InvalidRequest
from server.served_embedder import Float32Array, ServedEmbedder


def check_dimensions(wanted: int | None, model: ServedEmbedder) -> int:
    """How long the vectors are to be. Raises InvalidRequest if the model's are shorter."""
    if wanted is not None and wanted > model.dimensions:
        raise InvalidRequest(
            f"'dimensions' is {wanted}; the vectors of {model.name} have {model.dimensions}, which "
            "can be shortened and not made longer.",
            param="dimensions",
        )
    return wanted or model.dimensions


def shortened(vectors: Float32Array, dimensions: int) -> Float32Array:
    """The first `dimensions` numbers of each row [N, D], at length 1 again."""
    if dimensions == vectors.shape[1]:
        return vectors
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    result: Float32Array = cut / np.maximum(lengths, np.finfo(np.float32).tiny)
    return result


def embeddings_body(
    vectors: Float32Array, encoding_format: str, model: ServedEmbedder, num_tokens: int
) -> bytes:
    """The whole answer as JSON. Takes a while for many vectors: call it in a worker thread."""
    write = _base64 if encoding_format == "base64" else _numbers
    data = ",".join(
        f'{{"object":"embedding","index":{index},"embedding":{write(vector)}}}'
        for index, vector in enumerate(vectors)
    )
    usage = json_text({"prompt_tokens": num_tokens, "total_tokens": num_tokens})
    name = json_text(model.name)
    return f'{{"object":"list","data":[{data}],"model":{name},"usage":{usage}}}'.encode()


def _base64(vector: Float32Array) -> str:
    return f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")}"'


def _numbers(vector: Float32Array) -> str:
    return "[" + ",".join([f"{number:.9g}" for number in vector.tolist()]) + "]"
