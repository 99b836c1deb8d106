"""The requests of /v1/embeddings (OpenAI's) and /v1/rerank (Jina's and Cohere's).

Values are strict and nulls are absent, as in `protocol.py`. `input` and `documents` are read by
`embedding_inputs.py`. Known fields that ask for what is not done here are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from server import limits
from server.errors import InvalidRequest
from server.openapi import PROMPT
from server.protocol import Text

_DOCUMENT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "required": ["text"],
            "properties": {"text": {"type": "string", "minLength": 1}},
        },
    ]
}
_DOCUMENTS = {"type": "array", "minItems": 1, "items": _DOCUMENT}
_COUNT = Field(ge=1, le=limits.MAX_TOKENS)


class _EncoderBody(BaseModel):
    """What both endpoints share. `truncate_prompt_tokens`: keep so many tokens of a text, special
    ones included; -1 is as many as the model takes."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: Text | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS)] | None = None
    user: Text | None = None


class EmbeddingBody(_EncoderBody):
    """POST /v1/embeddings."""

    input: Annotated[Any, WithJsonSchema(PROMPT)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, _COUNT] | None = None


class RerankBody(_EncoderBody):
    """POST /v1/rerank."""

    query: Annotated[str, StringConstraints(min_length=1)]
    documents: Annotated[Any, WithJsonSchema(_DOCUMENTS)]
    top_n: Annotated[int, _COUNT] | None = None
    return_documents: bool = False


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "messages": ((), "give the text as 'input'"),
    "normalize": ((True,), "embeddings are always normalized"),
    "normalized": ((True,), "embeddings are always normalized"),
    "add_special_tokens": ((True,), "text always gets them; token ids are taken as they are"),
    "late_chunking": ((False,), "every text is embedded by itself"),
    "embedding_type": (("float",), "say 'encoding_format'"),
    "embedding_types": ((["float"],), "say 'encoding_format'"),
    "output_dtype": (("float",), "vectors are float32"),
    "rank_fields": ((["text"],), "a document's text is its field 'text'"),
}
"""Known fields: the values that ask for nothing, and what is done instead."""


def refuse_in_embeddings(body: dict[str, Any]) -> None:
    """Raises InvalidRequest for fields that other servers know and that would change vectors."""
    for name in _REFUSED.keys() & body.keys():
        neutral, reason = _REFUSED[name]
        value = body[name]
        if value is not None and not any(value == n and type(value) is type(n) for n in neutral):
            raise InvalidRequest(f"'{name}' is not served: {reason}.", param=name)
