"""How one server wants to be asked: token ids or text, which fields it knows, and what it says.

Found out by asking (`target.py`); building a request and reading a chunk are pure functions here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from server.bench.errors import RequestFailed
from server.bench.timing import Timing
from server.bench.workloads import Prompt, TokenRange, words_of


class PromptKind(StrEnum):
    TOKEN_IDS = "token ids"
    TEXT = "text"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Dialect:
    """`tokens`: the ids that the server takes. `knows_ignore_eos`: answers have as many tokens as
    asked for; otherwise they end where the model ends them."""

    kind: PromptKind = PromptKind.TOKEN_IDS
    knows_ignore_eos: bool = True
    tokens: TokenRange = field(default_factory=TokenRange)
    words_per_token: float = 1.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.kind is PromptKind.CHAT else "/v1/completions"

    def body(self, model: str, prompt: Prompt, num_new: int, **fields: Any) -> dict[str, Any]:
        """A greedy, streamed request. `fields` that are None are left out."""
        body: dict[str, Any] = {"model": model, "max_tokens": num_new, "temperature": 0}
        if self.kind is PromptKind.TOKEN_IDS:
            body["prompt"] = list(prompt)
        else:
            text = words_of(prompt, self.words_per_token)
            is_chat = self.kind is PromptKind.CHAT
            body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {}
            body |= {} if is_chat else {"prompt": text}
        if self.knows_ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": num_new}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | {name: value for name, value in fields.items() if value is not None}


class StreamReader:
    """Takes the events of one answer, with their times, and gives its timing at the end."""

    def __init__(self) -> None:
        self._with_text: list[float] = []
        self._with_choice: list[float] = []
        self._usage: dict[str, Any] = {}

    @property
    def num_chunks(self) -> int:
        return len(self._with_text)

    def take(self, data: bytes, time_s: float) -> bool:
        """Whether the event has text. `time_s`: seconds since the request was sent.

        Raises RequestFailed on an error event.
        """
        if data == b"[DONE]":
            return False
        try:
            event = json.loads(data)
        except ValueError as error:
            raise RequestFailed(f"an event of the stream is not JSON: {data[:80]!r}") from error
        if event.get("error"):
            message = event["error"]
            text = message.get("message") if isinstance(message, dict) else message
            raise RequestFailed(f"the stream ended in an error: {text}")
        self._usage = event.get("usage") or self._usage
        choices = event.get("choices") or ()
        self._with_choice.extend(time_s for _ in choices)
        with_text = [time_s for choice in choices if _text_of(choice)]
        self._with_text += with_text
        return bool(with_text)

    def timing(self, total_s: float) -> Timing:
        """An answer without any visible text counts its chunks instead."""
        prompt_details = self._usage.get("prompt_tokens_details") or {}
        details = self._usage.get("completion_tokens_details") or {}
        accepted = int(details.get("accepted_prediction_tokens") or 0)
        rejected = int(details.get("rejected_prediction_tokens") or 0)
        return Timing(
            tuple(self._with_text or self._with_choice),
            total_s,
            self._usage.get("prompt_tokens"),
            self._usage.get("completion_tokens"),
            prompt_details.get("cached_tokens"),
            accepted + rejected,
            accepted,
        )


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return text if isinstance(text, str) else ""
