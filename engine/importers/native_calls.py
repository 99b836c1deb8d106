"""Calls into libraries written in Rust, with files of strangers: whatever they raise, or panic
with, becomes one ImportFailed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import ImportFailed

_PANIC = "PanicException"
MAX_REASON = 200


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """`what` begins the message: "x.json is not a tokenizer". Raises ImportFailed."""
    try:
        yield
    except ImportFailed:
        raise
    except Exception as exc:  # the libraries raise bare Exceptions
        raise _refusal(what, exc) from exc
    except BaseException as exc:
        # A panic is no Exception, lest somebody catches it; here it is the file's fault.
        if type(exc).__name__ != _PANIC:
            raise
        raise _refusal(what, exc) from exc


def _refusal(what: str, exc: BaseException) -> ImportFailed:
    reason = " ".join(str(exc).split())[:MAX_REASON]
    return ImportFailed(f"{what}: {reason or type(exc).__name__}; download it again")
