"""What can go wrong between a benchmark and what it measures; messages are one line."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot go on; the message says what to do."""


class RequestFailed(Exception):
    """A server did not answer a request as it should; the case it belongs to has no value."""


class TargetLost(RequestFailed):
    """Nobody answers at the server's address any more."""


class NotAvailable(Exception):
    """A figure that this server or this machine cannot have; the message says why."""
