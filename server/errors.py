"""Every error that a client can see, as a tree. Knows OpenAI's error shape, not HTTP frameworks.

ApiError
├── InvalidRequest         400  the caller's fault; `param` names the field
│   ├── ContextExceeded    400  the prompt does not fit; code `context_length_exceeded`
│   ├── WrongModelKind     400  text from an embedding model, or the other way round
│   └── BodyTooLarge       413  the body is over the limit
├── InvalidApiKey          401  no key, or a wrong one
├── HostNotAllowed         403  a Host header that is not ours (DNS rebinding)
├── UnknownModel           404  lists what is served
├── ResponseNotFound       404  no stored response of that id belongs to the caller
├── DebugDisabled          404  /debug is not turned on
├── TraceBusy              409  one trace of an engine at a time
├── QueueFull              429  with Retry-After
├── RateLimited            429  an API key's own limit; with Retry-After and x-ratelimit-…
├── EngineUnavailable      503  loading, dead or draining; with Retry-After
├── DeadlineExceeded       504  the request's own time limit passed
└── GenerationFailed       500  ours: the engine failed this sequence

Everything else that escapes a handler is answered as a bare 500 without its text. SDKs retry 408,
409, 429 and 5xx by themselves, so bad input is never a 5xx and overload always is 429 or 503.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ApiError(Exception):
    """Base. `message` is one or two sentences for a human; `param` and `code` are for programs."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that belong to this error."""
        return {}

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object: always the same four keys."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class ContextExceeded(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(
        self, max_model_len: int, prompt_tokens: int, *, param: str, code: str | None = None
    ) -> None:
        # LiteLLM and others look for the first sentence literally.
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your "
            f"{param} resulted in {prompt_tokens} tokens, and at least one token must be left "
            f"for the answer. Please reduce the length of the {param}.",
            param=param,
            code=code,
        )


class WrongModelKind(InvalidRequest):
    code = "model_not_supported"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model")


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class InvalidApiKey(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class HostNotAllowed(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "host_not_allowed"


class UnknownModel(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, name: str, served: Sequence[str]) -> None:
        shown = name if len(name) <= 200 else name[:200] + "…"
        listed = ", ".join(served) if served else "none"
        super().__init__(
            f"The model '{shown}' does not exist. Models served here: {listed}.", param="model"
        )


class ResponseNotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id[:80]}' not found.", param="response_id")


class DebugDisabled(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "debug_disabled"

    def __init__(self) -> None:
        super().__init__(
            "Debugging is off. Start the server with --debug, or set debug = true in the table "
            "[server] of its configuration."
        )


class TraceBusy(ApiError):
    status = 409
    type = "invalid_request_error"
    code = "trace_busy"


class _Capacity(ApiError):
    """Overload or absence; `retry_after_s` becomes a whole number of seconds, at least 1."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(max(1, int(self.retry_after_s + 0.999)))}


class QueueFull(_Capacity):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class RateLimited(_Capacity):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float, limits: Mapping[str, str]) -> None:
        super().__init__(message, retry_after_s)
        self._limits = limits

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, **self._limits}


class EngineUnavailable(_Capacity):
    status = 503
    type = "server_error"
    code = "engine_unavailable"


class DeadlineExceeded(ApiError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"

    @property
    def headers(self) -> dict[str, str]:
        # SDKs repeat a 504 by themselves; the caller who set the limit wants to know instead.
        return {"x-should-retry": "false"}


class GenerationFailed(ApiError):
    code = "generation_failed"
