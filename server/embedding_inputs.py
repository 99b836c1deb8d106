"""The texts of /v1/embeddings and /v1/rerank, to lists of token ids that the encoder takes.

`input` has OpenAI's four forms: a string, a list of strings, a list of token ids, a list of such
lists; never empty and never mixed. Text gets the model's special tokens. Token ids are taken as
they are, and are only worth something if they come from the model's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.errors import InvalidRequest
from server.limits import MAX_EMBEDDING_INPUTS, MAX_EMBEDDING_TOKENS
from server.served_embedder import ServedEmbedder

TokenIds = tuple[int, ...]


def read_inputs(value: Any) -> list[str | TokenIds]:
    """The inputs in order, text still as text. Raises InvalidRequest."""
    if isinstance(value, str):
        return [_text(value, "input")]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "'input' must be a string, a list of strings, a list of token ids or a list of lists "
            "of token ids, and not empty.",
            param="input",
        )
    if _is_token_id(value[0]):
        return [_token_ids(value, "input")]
    _check_count(value, "input")
    if isinstance(value[0], str):
        return [_text(item, f"input[{i}]") for i, item in enumerate(value)]
    return [_token_ids(item, f"input[{i}]") for i, item in enumerate(value)]


def read_documents(value: Any) -> list[str]:
    """The texts of `documents`: strings, or objects with a `text`. Raises InvalidRequest."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "'documents' must be a list of strings or of objects with a 'text', and not empty.",
            param="documents",
        )
    _check_count(value, "documents")
    texts = [item.get("text") if isinstance(item, dict) else item for item in value]
    return [_text(text, f"documents[{i}]") for i, text in enumerate(texts)]


def encode_inputs(
    inputs: Sequence[str | TokenIds],
    model: ServedEmbedder,
    truncate_to: int | None,
    names: Sequence[str],
) -> tuple[TokenIds, ...]:
    """The token ids of each input, checked; `names[i]` is what errors call input i.

    `truncate_to`: `truncate_prompt_tokens`. May be slow for long text: call it in a worker thread.

    Raises:
        InvalidRequest: an input is too long or names an unknown token, or all are too many.
    """
    limit = _truncation(truncate_to, model, model.tokenizer.num_special_tokens)
    encoded: list[TokenIds] = []
    num_tokens = 0
    for given, name in zip(inputs, names, strict=True):
        token_ids = _encode(given, model, limit, name)
        num_tokens = _add_tokens(num_tokens, token_ids, name)
        encoded.append(token_ids)
    return tuple(encoded)


def encode_pairs(
    query: str, documents: Sequence[str], model: ServedEmbedder, truncate_to: int | None
) -> tuple[TokenIds, ...]:
    """The token ids of the query with each document, for a cross-encoder, checked.

    `truncate_to` shortens documents, never the query. May be slow: call it in a worker thread.

    Raises:
        InvalidRequest: a pair is too long, or all are too many tokens.
    """
    limit = _truncation(truncate_to, model, model.tokenizer.num_pair_tokens)
    encoded: list[TokenIds] = []
    num_tokens = 0
    for i, document in enumerate(documents):
        token_ids = model.tokenizer.encode_pair(query, document, limit)
        name = f"documents[{i}]"
        _check_length(token_ids, model, name, f"the query with '{name}'")
        num_tokens = _add_tokens(num_tokens, token_ids, name)
        encoded.append(token_ids)
    return tuple(encoded)


def input_names(inputs: Sequence[str | TokenIds]) -> list[str]:
    return ["input"] if len(inputs) == 1 else [f"input[{i}]" for i in range(len(inputs))]


def _encode(
    given: str | TokenIds, model: ServedEmbedder, truncate_to: int | None, name: str
) -> TokenIds:
    if isinstance(given, str):
        token_ids = model.tokenizer.encode(given, truncate_to)
    else:
        token_ids = given if truncate_to is None else given[:truncate_to]
        _check_known(given, model, name)
    _check_length(token_ids, model, name, f"'{name}'")
    return token_ids


def _check_length(token_ids: TokenIds, model: ServedEmbedder, name: str, what: str) -> None:
    if len(token_ids) > model.context_limit:
        # LiteLLM and others look for the first sentence literally.
        raise InvalidRequest(
            f"This model's maximum context length is {model.context_limit} tokens. However, "
            f"{what} resulted in {len(token_ids)} tokens. Please shorten it, or set "
            "'truncate_prompt_tokens' to -1 to read only its beginning.",
            param=_field(name),
            code="context_length_exceeded",
        )


def _add_tokens(num_tokens: int, token_ids: TokenIds, name: str) -> int:
    """The sum, as long as it is allowed."""
    if num_tokens + len(token_ids) > MAX_EMBEDDING_TOKENS:
        raise InvalidRequest(
            f"The request has more than {MAX_EMBEDDING_TOKENS} tokens in all; the limit is "
            f"passed at '{name}'. Send fewer texts at a time.",
            param=_field(name),
        )
    return num_tokens + len(token_ids)


def _truncation(wanted: int | None, model: ServedEmbedder, num_special: int) -> int | None:
    """How many tokens of a text to keep at most, or None for all."""
    if wanted is None:
        return None
    lowest = num_special + 1
    if wanted == -1:
        return model.context_limit
    if not lowest <= wanted <= model.context_limit:
        raise InvalidRequest(
            f"'truncate_prompt_tokens' is {wanted}; it must be -1 or from {lowest} to "
            f"{model.context_limit}, the maximum length of a text for this model.",
            param="truncate_prompt_tokens",
        )
    return wanted


def _check_known(token_ids: TokenIds, model: ServedEmbedder, name: str) -> None:
    if (highest := max(token_ids)) >= model.vocab_size:
        raise InvalidRequest(
            f"'{name}' holds the token id {highest}; this model has ids from 0 to "
            f"{model.vocab_size - 1}.",
            param=_field(name),
        )


def _check_count(value: list[Any], name: str) -> None:
    if len(value) > MAX_EMBEDDING_INPUTS:
        raise InvalidRequest(
            f"'{name}' may hold {MAX_EMBEDDING_INPUTS} texts; it holds {len(value)}.", param=name
        )


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(
            f"'{name}' must be a string, as the others are: forms cannot be mixed."
            if name.startswith("input")
            else f"'{name}' must be a string or an object with a 'text'.",
            param=_field(name),
        )
    if not value:
        raise InvalidRequest(f"'{name}' is an empty string.", param=_field(name))
    return value


def _token_ids(value: Any, name: str) -> TokenIds:
    if not isinstance(value, list) or not value or not all(map(_is_token_id, value)):
        raise InvalidRequest(
            f"'{name}' must be a list of token ids, from 0 up, and not empty: forms cannot be "
            "mixed.",
            param=_field(name),
        )
    return tuple(value)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _field(name: str) -> str:
    return name.partition("[")[0]
