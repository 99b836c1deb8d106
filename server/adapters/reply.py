"""What the replies of all dialects share: identity, usage, JSON text, the frames of an SSE.

Built for the per-token path: no models, small dictionaries, one `json.dumps` per chunk.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from server.errors import ApiError
from server.events import Usage
from server.served_model import ServedModel

DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The same in every chunk of a reply. `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None

    def fields(self, kind: str) -> dict[str, Any]:
        """The leading fields of a body or chunk whose `object` is `kind`."""
        head: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        if self.service_tier is not None:
            head["service_tier"] = self.service_tier
        return head


def new_reply(prefix: str, model: ServedModel, service_tier: str | None) -> ReplyHead:
    """`service_tier` as it was asked for; the reply names the one that was used."""
    info = model.engine.info
    build = f"{info.device}-{info.weight_format}-{info.kv_format}" if info else "loading"
    return ReplyHead(
        id=f"{prefix}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=model.name,
        system_fingerprint=f"hexlm-{build}",
        service_tier="default" if service_tier == "auto" else service_tier,
    )


def json_text(value: Any) -> str:
    """Compact JSON. Raises ValueError for NaN, which is not JSON."""
    return _encode(value)


def json_bytes(value: Any) -> bytes:
    return _encode(value).encode()


def frame(text: str) -> bytes:
    """One server-sent event; `text` is JSON, so it has no line breaks."""
    return f"data: {text}\n\n".encode()


def error_frame(error: ApiError) -> bytes:
    """The event that ends a stream which failed after its headers were sent."""
    return frame(json_text(error.body()))


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.draft_tokens - usage.accepted_tokens,
        },
    }
