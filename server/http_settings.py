"""What the HTTP side can be told, apart from the models. Plain values; `config.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.api_keys import ApiKey


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of `create_app`.

    `keep_alive_interval_s`: pause between comments in an event stream. `api_keys` and
    `key_policies` (keys with a priority or limits): none of both means open. `cors_origins`:
    origins of web pages that may call, "*" for all. `trusted_hosts`: names that a Host header may
    carry, without port; none means any (give the loopback names when bound to loopback, against
    DNS rebinding). `default_timeout_s`: a request's deadline, None for none. `max_stored_…`: of
    responses kept for later; `max_background_responses`: run at one time. `debug`: whether
    /debug/… answers.
    """

    keep_alive_interval_s: float = 10.0
    max_body_bytes: int = 8 * 2**20
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    default_timeout_s: float | None = None
    key_policies: tuple[ApiKey, ...] = ()
    max_stored_responses: int = 1_000
    max_stored_response_bytes: int = 64 * 2**20
    max_background_responses: int = 32
    debug: bool = False

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("an API key must not be empty")

    @property
    def all_keys(self) -> tuple[ApiKey, ...]:
        return (*(ApiKey(secret) for secret in self.api_keys), *self.key_policies)
