"""Responses kept in memory for `previous_response_id`, retrieval and item references.

Bounded by number and by bytes; what was not used for longest goes first. A response in progress
is not evicted: its run is bounded elsewhere (`background.py`). Everything is kept as JSON text, so
that the bytes counted are the bytes held, and each response holds its whole conversation, so that
the loss of an earlier one breaks nothing. Scopes are API keys: an id of another scope is unknown.

Belongs to the event loop's thread. Knows nothing of HTTP or of what a response says.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from server.adapters.reply import json_bytes
from server.response_log import ResponseLog

Item = dict[str, Any]

_ENTRY_OVERHEAD_BYTES = 1_024
"""An allowance for the objects around the text and the ids of its items."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`response` is the body as JSON, `items` the list of all items that led to it, `log` its
    events if they are kept, of which `log_bytes` are counted."""

    id: str
    scope: str
    response: bytes
    items: bytes
    in_progress: bool = False
    log: ResponseLog | None = None
    log_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + self.log_bytes + _ENTRY_OVERHEAD_BYTES

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.response)
        return body

    def input_items(self) -> list[Item]:
        items: list[Item] = json.loads(self.items)
        return items

    def conversation(self) -> list[Item]:
        """All items up to and with the response's own."""
        return [*self.input_items(), *self.body()["output"]]


class ResponseStore:
    """`max_bytes` counts JSON text and a fixed overhead per response."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._owner_of_item: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(
        self,
        scope: str,
        response: dict[str, Any],
        items: list[Item],
        *,
        in_progress: bool = False,
        log: ResponseLog | None = None,
    ) -> None:
        """Keep `response`, or replace what is kept under its id, but not its log. One that is
        larger than the whole store is not kept."""
        before = self._stored.get(response["id"])
        if log is None and before is not None:
            log = before.log
        text = json_bytes(response)
        # The last event repeats the response and is still to come.
        log_bytes = 0 if log is None else log.num_bytes + len(text)
        stored = StoredResponse(
            response["id"], scope, text, json_bytes(items), in_progress, log, log_bytes
        )
        self._remove(stored.id)
        if stored.num_bytes > self._max_bytes and not in_progress:
            return
        self._stored[stored.id] = stored
        self._num_bytes += stored.num_bytes
        for item in response["output"]:
            self._owner_of_item[scope, item["id"]] = stored.id
        self._evict()

    def get(self, scope: str, response_id: str) -> StoredResponse | None:
        stored = self._stored.get(response_id)
        if stored is None or stored.scope != scope:
            return None
        self._stored.move_to_end(response_id)
        return stored

    def find_item(self, scope: str, item_id: str) -> Item | None:
        """An item that a kept response put out."""
        stored = self._stored.get(self._owner_of_item.get((scope, item_id), ""))
        output = stored.body()["output"] if stored is not None else []
        return next((item for item in output if item["id"] == item_id), None)

    def delete(self, scope: str, response_id: str) -> bool:
        """Whether there was something to delete."""
        if self.get(scope, response_id) is None:
            return False
        self._remove(response_id)
        return True

    def _remove(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is None:
            return
        self._num_bytes -= stored.num_bytes
        for item in stored.body()["output"]:
            self._owner_of_item.pop((stored.scope, item["id"]), None)

    def _evict(self) -> None:
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            oldest = next((s.id for s in self._stored.values() if not s.in_progress), None)
            if oldest is None:
                return
            self._remove(oldest)
