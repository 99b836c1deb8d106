"""The request of OpenAI's Responses API, as far as it concerns text.

What Responses shares with chat (sampling, priority, extensions such as `top_k`) is passed on and
validated by `protocol.ChatBody`; here stand the fields that only Responses has. `input` is read by
`response_items.py`. Known fields that ask for what this server does not do are refused by
`check_responses_fields`. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from server import limits
from server.errors import InvalidRequest
from server.protocol import Text

INCLUDES_LOGPROBS = "message.output_text.logprobs"
INCLUDES_REASONING = "reasoning.encrypted_content"
"""What clients ask for to carry thoughts on by themselves. Here a reasoning item holds its thought
in the clear, so there is nothing to add to it."""

_INCLUDES = (INCLUDES_LOGPROBS, INCLUDES_REASONING)

_MetadataKey = Annotated[str, StringConstraints(max_length=64)]
_MetadataValue = Annotated[str, StringConstraints(max_length=512)]

_PART: dict[str, Any] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
}
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _MESSAGE}]}
_FORMAT = {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}}
_TOOL = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}},
}
_TOOL_CHOICE = {"enum": ["none", "auto"]}
_INCLUDE = {"enum": [*_INCLUDES]}

_REFUSED = {
    "prompt": "prompt templates are not stored here",
    "conversation": "conversations are not stored here; use 'previous_response_id'",
    "context_management": "the context is not managed by the server",
    "moderation": "there is no moderation model",
    "background_options": "background responses begin at once",
    "access_programs": "there are no access programs",
    "image": "only text is served",
    "modalities": "only text is served",
    "audio": "only text is served",
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class TextConfig(_Strict):
    """`format` has one of the types text, json_object and json_schema."""

    format: Annotated[dict[str, Any], WithJsonSchema(_FORMAT)] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(_Strict):
    """Echoed; `effort` is passed on to the chat template's side."""

    effort: Text | None = None
    summary: Text | None = None
    generate_summary: Text | None = None


class ResponseStreamOptions(_Strict):
    include_obfuscation: bool | None = None


class ResponseBody(_Strict):
    """POST /v1/responses. `max_tool_calls` limits built-in tools, of which there are none.

    `truncation` "auto" leaves out the oldest turns of a conversation that is too long; otherwise
    it is refused with the number of its tokens. `input` may be absent only after another response.
    """

    model_config = ConfigDict(json_schema_extra={"required": ["input"]})

    model: Text | None = None
    input: Annotated[Any, WithJsonSchema(_INPUT)] = None
    instructions: str | None = None
    previous_response_id: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    max_tool_calls: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] = 0
    include: list[Annotated[Text, WithJsonSchema(_INCLUDE)]] = []
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig | None = None
    tools: Annotated[
        list[Annotated[Any, WithJsonSchema(_TOOL)]], Field(max_length=limits.MAX_TOOLS)
    ] = []
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE)] = "auto"
    parallel_tool_calls: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)] = {}
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    service_tier: Text | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @property
    def wants_logprobs(self) -> bool:
        return INCLUDES_LOGPROBS in self.include or self.top_logprobs > 0


def check_responses_fields(value: dict[str, Any]) -> None:
    """Raise InvalidRequest for a known field that asks for what is not done."""
    for name in _REFUSED.keys() & value.keys():
        if value[name] not in (None, [], {}):
            raise InvalidRequest(f"'{name}' is not served: {_REFUSED[name]}.", param=name)


def check_response_body(body: ResponseBody) -> None:
    """Raise InvalidRequest where single fields are right and ask for what is not done."""
    check_include(body.include)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise InvalidRequest(
            "'stream_options.include_obfuscation' is not served: events are not padded.",
            param="stream_options.include_obfuscation",
        )
    if body.background and not body.store:
        raise InvalidRequest("'background' needs 'store' to be true.", param="background")


def check_include(include: Sequence[str]) -> None:
    """Raise InvalidRequest for what a response cannot include."""
    for i, name in enumerate(include):
        if name not in _INCLUDES:
            raise InvalidRequest(
                f"'include' asks for '{name[:80]}', which this server cannot give; it can "
                f"include {' and '.join(_INCLUDES)}.",
                param=f"include[{i}]",
            )


def check_retrieval(stream: bool, starting_after: int | None, include_obfuscation: bool) -> None:
    """Raise InvalidRequest for what no retrieval of a response can do."""
    if starting_after is not None and not stream:
        raise InvalidRequest(
            "'starting_after' is only allowed when 'stream' is true.", param="starting_after"
        )
    if include_obfuscation:
        raise InvalidRequest(
            "'include_obfuscation' is not served: events are not padded.",
            param="include_obfuscation",
        )
