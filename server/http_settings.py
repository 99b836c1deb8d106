"""What the HTTP side can be told, apart from the models. Plain values; `config.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of `create_app`.

    `keep_alive_interval_s`: pause between comments in an event stream. `api_keys`: none means
    open. `cors_origins`: origins of web pages that may call, "*" for all. `trusted_hosts`: names
    that a Host header may carry, without port; none means any (give the loopback names when bound
    to loopback, against DNS rebinding). `default_timeout_s`: a request's deadline, None for none.
    """

    keep_alive_interval_s: float = 10.0
    max_body_bytes: int = 8 * 2**20
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    default_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("an API key must not be empty")
