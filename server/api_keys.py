"""API keys and what each of them may do. The secret shows in no repr, log or error.

Knows nothing of HTTP (`middleware.py` finds the key in a request) and of files (`config.py`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.messages import Priority
from server.errors import InvalidApiKey
from server.rate_limit import RateLimiter


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`priority`: the class of the key's requests, which may ask for a lower one and not for a
    higher one; None leaves it to the request. Limits are per minute, None for none.

    Raises:
        ValueError: the secret is empty.
    """

    secret: str = field(repr=False)
    name: str = ""
    priority: Priority | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        if not self.secret.strip():
            raise ValueError("an API key must not be empty")


class Tenant:
    """Everything that belongs to one key while the server runs.

    `cache_scope` is a digest of the key: it separates prefix caches and stored responses.
    """

    def __init__(self, key: ApiKey) -> None:
        self._secret = key.secret.encode()
        self.name = key.name
        self.priority = key.priority
        self.limiter = RateLimiter(key.requests_per_minute, key.tokens_per_minute)
        self.cache_scope = hashlib.blake2b(
            self._secret, digest_size=16, person=b"hexlm-cache-key"
        ).hexdigest()

    def has_secret(self, given: bytes) -> bool:
        return hmac.compare_digest(self._secret, given)


class Keyring:
    """All keys of a server; an empty one lets everybody in."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._tenants = tuple(Tenant(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def find(self, given: bytes | None) -> Tenant:
        """Every key is compared, so that time tells nothing. Raises InvalidApiKey."""
        if given is None:
            raise InvalidApiKey("No API key was given. Send it as 'Authorization: Bearer <key>'.")
        matches = [tenant for tenant in self._tenants if tenant.has_secret(given)]
        if not matches:
            raise InvalidApiKey("The API key is not valid.")
        return matches[0]
