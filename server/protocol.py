"""The requests of OpenAI's chat and completions endpoints, and the extensions of local servers.

Values are strict: no numbers in strings, no booleans as numbers, no NaN. Null is the same as
leaving a field out. Unknown fields are ignored. Fields that are known, that ask for something and
that this server does not do are refused by `refusals.py`, not here. Knows nothing of models:
what depends on the vocabulary is checked in `sampling.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from server import limits
from server.openapi import MESSAGES, PROMPT

Text = Annotated[str, StringConstraints(max_length=limits.MAX_IDENTIFIER_CHARS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-limits.PENALTY_RANGE, le=limits.PENALTY_RANGE)]
MaxTokens = Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None


class JsonSchemaFormat(_Strict):
    """`strict` changes nothing: a schema is always enforced."""

    name: Text | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """`schema` beside the type `json_object` is llama.cpp's way."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class PredictedText(_Strict):
    type: Literal["text"]
    text: str


class Prediction(_Strict):
    """What the client expects to be the answer. It makes it faster where it is right, and changes
    nothing else."""

    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StructuredOutputs(_Strict):
    """vLLM's field; at most one of the first five may be given."""

    schema_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class GenerationBody(_Strict):
    """What chat and completions share."""

    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    stop: (
        StopString | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)] | None
    ) = None

    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[str, Any], Field(max_length=limits.MAX_LOGIT_BIAS)] | None = None

    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=limits.MAX_REPETITION_PENALTY)] = 1.0
    min_tokens: MaxTokens = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS)] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS)] | None = None
    return_token_ids: bool = False
    timeout: Annotated[float, Field(gt=0, le=limits.MAX_TIMEOUT_S)] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    priority: (
        Annotated[int, Field(ge=-limits.PRIORITY_RANGE, le=limits.PRIORITY_RANGE)]
        | Literal["high", "normal", "low"]
        | None
    ) = None
    service_tier: Text | None = None
    cache_salt: Text | None = None
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. `messages` is read by `messages.py`, tools by `tools.py`."""

    messages: Annotated[Any, WithJsonSchema(MESSAGES)]
    max_tokens: (
        Annotated[int, Field(ge=limits.CHAT_MIN_MAX_TOKENS, le=limits.MAX_TOKENS)] | None
    ) = None
    max_completion_tokens: (
        Annotated[int, Field(ge=limits.CHAT_MIN_MAX_TOKENS, le=limits.MAX_TOKENS)] | None
    ) = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_budget: MaxTokens | None = None
    include_reasoning: bool = True
    prediction: Prediction | None = None

    @property
    def token_limit(self) -> int | None:
        """The smaller of `max_tokens` and `max_completion_tokens`."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given) if given else None


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is read by `prompts.py`."""

    prompt: Annotated[Any, WithJsonSchema(PROMPT)]
    max_tokens: MaxTokens | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None


class TokenizeBody(_Strict):
    """POST /tokenize: either `prompt` or `messages`."""

    model: Text | None = None
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema(MESSAGES)] = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Any = None
    return_token_strs: bool = False


class DetokenizeBody(_Strict):
    """POST /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], FailFast()]
