"""The states of one engine as the server sees it. Knows nothing of processes or of HTTP.

```
LOADING ──► READY ◄──► RESTARTING ──► FAILED       DRAINING is entered from any of them
   │          └──► STALLED ──► RESTARTING
   └──► FAILED
```
"""

from __future__ import annotations

from enum import StrEnum


class EngineState(StrEnum):
    """`READY` alone accepts requests. `STALLED` and `RESTARTING` heal themselves.

    `FAILED` is final until the model is loaded again.
    """

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    STALLED = "stalled"
    FAILED = "failed"
    DRAINING = "draining"
