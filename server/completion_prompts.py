"""The `prompt` of /v1/completions in its four forms, to lists of token ids.

A string, a list of strings, one list of token ids or a list of such lists. Text is read with
control tokens recognised: the client wrote the whole prompt and there are no roles to forge. BOS
is added once to text if the model wants it; token ids are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.errors import InvalidRequest
from server.limits import MAX_PROMPTS
from server.sampling import check_token_ids
from server.served_model import ServedModel

TokenIds = list[int]


def read_prompts(value: Any) -> list[str | TokenIds]:
    """The prompts in order, text still as text. Raises InvalidRequest."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "'prompt' must be a string, a list of strings, a list of token ids or a list of "
            "lists of token ids, and not empty.",
            param="prompt",
        )
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(
            f"'prompt' may hold {MAX_PROMPTS} prompts; it holds {len(value)}.", param="prompt"
        )
    return [_one_prompt(prompt, f"prompt[{i}]") for i, prompt in enumerate(value)]


def encode_prompts(prompts: Sequence[str | TokenIds], model: ServedModel) -> list[TokenIds]:
    """Token ids of each prompt, checked. May be slow for long text: call it in a worker thread."""
    return [_encode(prompt, model) for prompt in prompts]


def _one_prompt(prompt: Any, where: str) -> str | TokenIds:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return _token_ids(prompt, where)
    raise InvalidRequest(f"'{where}' must be a string or a list of token ids.", param="prompt")


def _token_ids(value: list[Any], where: str) -> TokenIds:
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise InvalidRequest(f"'{where}' must hold token ids, from 0 up.", param="prompt")
    return value


def _encode(prompt: str | TokenIds, model: ServedModel) -> TokenIds:
    if isinstance(prompt, str):
        token_ids = model.tokenizer.encode_parsed(prompt)
    else:
        check_token_ids(prompt, model, "prompt")
        token_ids = prompt
    if not token_ids:
        raise InvalidRequest(
            "'prompt' is empty, and this model has no token that begins a text.", param="prompt"
        )
    return token_ids
