"""Known fields that ask for what this server does not do: each is a 400 that names the field.

A field that is merely present, empty or set to its neutral value is accepted. Knows the fields'
meaning at OpenAI and vLLM; not how a request is served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.errors import InvalidRequest

Asks = Callable[[Any], bool]


def _is_given(value: Any) -> bool:
    return value not in (None, False, "", [], {})


def _is_not(*neutral: Any) -> Asks:
    return lambda value: value is not None and value not in neutral


_REFUSED_EVERYWHERE: dict[str, tuple[Asks, str]] = {
    "guided_whitespace_pattern": (_is_given, "JSON is written with one space at most"),
    "use_beam_search": (_is_given, "beam search is not supported"),
    "allowed_token_ids": (_is_given, "use 'logit_bias' or structured output"),
    "bad_words": (_is_given, "use 'logit_bias'"),
    "logits_processors": (_is_given, "code of clients is not run"),
    "return_tokens_as_token_ids": (_is_given, "use 'return_token_ids'"),
}

_REFUSED_IN_CHAT: dict[str, tuple[Asks, str]] = {
    "audio": (_is_given, "audio output is not supported"),
    "modalities": (_is_not([], ["text"]), "only text output is supported"),
    "function_call": (_is_not("none", "auto"), "it is only allowed with 'functions'"),
    "web_search_options": (_is_given, "web search is not supported"),
    "moderation": (_is_given, "there is no moderation model"),
    "verbosity": (_is_not("medium"), "models are not told how long to be; say it in a message"),
    "echo": (_is_given, "the prompt is not echoed in chat"),
    "prompt_logprobs": (_is_not(), "score a prompt by /v1/completions with 'echo'"),
    "chat_template": (_is_given, "the model's own template is used"),
    "add_special_tokens": (_is_given, "the template writes the special tokens"),
}

_REFUSED_IN_COMPLETIONS: dict[str, tuple[Asks, str]] = {
    "suffix": (_is_given, "text cannot be inserted before a suffix"),
    "prompt_embeds": (_is_given, "prompts are text or token ids"),
}


def refuse_in_chat(body: dict[str, Any]) -> None:
    _refuse(body, _REFUSED_EVERYWHERE | _REFUSED_IN_CHAT)
    _check_stream_options(body)


def refuse_in_completions(body: dict[str, Any]) -> None:
    _refuse(body, _REFUSED_EVERYWHERE | _REFUSED_IN_COMPLETIONS)
    best_of, n = body.get("best_of"), body.get("n")
    if isinstance(best_of, int) and best_of != (n if isinstance(n, int) else 1):
        raise InvalidRequest(
            "'best_of' must equal 'n': choosing among more choices is not supported.",
            param="best_of",
        )
    _check_stream_options(body)


def _refuse(body: dict[str, Any], table: dict[str, tuple[Asks, str]]) -> None:
    for name in table.keys() & body.keys():
        asks, reason = table[name]
        if asks(body[name]):
            raise InvalidRequest(f"'{name}' is not served: {reason}.", param=name)


def _check_stream_options(body: dict[str, Any]) -> None:
    if body.get("stream_options") is not None and not body.get("stream"):
        raise InvalidRequest(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
