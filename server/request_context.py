"""What a route knows of the HTTP request beside its body. Plain values."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from scheduler.messages import Priority


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`cache_scope` separates the prefix caches of API keys; clients cannot set it.

    `highest_priority` is the class of the key: what the request asks for may be lower, not higher.
    `arrival_s` is `time.monotonic()` when the request came in.
    """

    cache_scope: str = ""
    timeout_s: float | None = None
    highest_priority: Priority | None = None
    arrival_s: float = field(default_factory=time.monotonic)
