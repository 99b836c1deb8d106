"""Known fields that ask for what this server does not do: each is a 400 that names the field.

A field that is merely present, empty or set to its neutral value is accepted. Knows the fields'
meaning at OpenAI and vLLM; not how a request is served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.errors import InvalidRequest
from server.limits import MAX_TOOLS

Asks = Callable[[Any], bool]


def _is_given(value: Any) -> bool:
    return value not in (None, False, "", [], {})


def _is_not(*neutral: Any) -> Asks:
    return lambda value: value is not None and value not in neutral


_REFUSED_EVERYWHERE: dict[str, tuple[Asks, str]] = {
    "response_format": (
        lambda value: value is not None and _type_of(value) != "text",
        "only the type 'text' is supported",
    ),
    **{
        name: (_is_given, "structured output is not supported")
        for name in (
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "grammar",
            "json_schema",
        )
    },
    "use_beam_search": (_is_given, "beam search is not supported"),
}

_REFUSED_IN_CHAT: dict[str, tuple[Asks, str]] = {
    "audio": (_is_given, "audio output is not supported"),
    "modalities": (_is_not([], ["text"]), "only text output is supported"),
    "functions": (_is_given, "function calling is not supported"),
    "function_call": (_is_not("none", "auto"), "function calling is not supported"),
    "prediction": (_is_given, "predicted outputs are not supported"),
    "web_search_options": (_is_given, "web search is not supported"),
    "echo": (_is_given, "the prompt is not echoed in chat"),
}

_REFUSED_IN_COMPLETIONS: dict[str, tuple[Asks, str]] = {
    "suffix": (_is_given, "text cannot be inserted before a suffix"),
    "prompt_embeds": (_is_given, "prompts are text or token ids"),
}


def refuse_in_chat(body: dict[str, Any]) -> None:
    _refuse(body, _REFUSED_EVERYWHERE | _REFUSED_IN_CHAT)
    _refuse_tools(body)
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


def _refuse_tools(body: dict[str, Any]) -> None:
    """Tools with `tool_choice` "none" ask for nothing; they are checked and left out."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("'tools' must be a list.", param="tools")
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"'tools' must have at most {MAX_TOOLS} entries; it has {len(tools)}.", param="tools"
        )
    if choice not in (None, "none", "auto"):
        raise InvalidRequest("'tool_choice': tool calls are not supported.", param="tool_choice")
    if tools and choice != "none":
        raise InvalidRequest(
            "'tools' is not served: tool calls are not supported. Leave it out or set "
            "'tool_choice' to 'none'.",
            param="tools",
        )


def _check_stream_options(body: dict[str, Any]) -> None:
    if body.get("stream_options") is not None and not body.get("stream"):
        raise InvalidRequest(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else value
