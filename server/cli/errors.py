"""Failures as the command line shows them: one line on stderr that says how to mend it.

The one place that knows every family of errors. Exit codes: 2 for a wrong command line, 130 for
Ctrl-C, 1 for everything else. A traceback is shown only for what nobody foresaw, and only in the
log at debug level.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass

import typer

from engine.errors import EngineError
from server.config import ConfigError
from server.sources.errors import StoreError

USAGE_EXIT = 2
FAILURE_EXIT = 1
INTERRUPTED_EXIT = 130

logger = logging.getLogger(__name__)


class CliError(Exception):
    """A failure that a verb found itself; the message is one line that says how to mend it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`message` is None where saying something would only be noise."""

    message: str | None
    exit_code: int


def translate(exc: BaseException) -> Failure:
    """Never raises."""
    if isinstance(exc, KeyboardInterrupt | typer.Abort):
        return Failure("interrupted", INTERRUPTED_EXIT)
    if is_usage_error(exc):
        return Failure(usage_message(exc), USAGE_EXIT)
    if isinstance(exc, ConfigError):
        return Failure(one_line(str(exc)), USAGE_EXIT)
    if isinstance(exc, CliError | StoreError | EngineError):
        return Failure(one_line(str(exc)), FAILURE_EXIT)
    if isinstance(exc, BrokenPipeError):
        return Failure(None, FAILURE_EXIT)
    if isinstance(exc, OSError):
        return Failure(os_error_message(exc), FAILURE_EXIT)
    logger.debug("unforeseen error", exc_info=exc)
    reason = one_line(str(exc)) or "no message"
    return Failure(
        f"internal error ({type(exc).__name__}: {reason}); please report it with the command",
        FAILURE_EXIT,
    )


def is_usage_error(exc: BaseException) -> bool:
    """Typer's own errors; which package defines their classes depends on its version."""
    return hasattr(exc, "format_message") and getattr(exc, "exit_code", None) == USAGE_EXIT


def usage_message(exc: BaseException) -> str | None:
    """None when there was no verb: the help that Typer has shown says everything."""
    message = one_line(exc.format_message())  # type: ignore[attr-defined]
    context = getattr(exc, "ctx", None)
    command = context.command_path if context is not None else "hexlm"
    return f"{message.rstrip('.')}; see `{command} --help`" if message else None


def os_error_message(exc: OSError) -> str:
    if exc.errno == errno.ENOSPC:
        return "the disk is full; make room and try again"
    if exc.errno == errno.EADDRINUSE:
        return "the port is in use; choose another with --port"
    name = f" {exc.filename}" if exc.filename is not None else ""
    if isinstance(exc, PermissionError):
        return f"no permission for{name or ' this'}; check the permissions of the cache folder"
    return one_line(f"{exc.strerror or exc}{':' + name if name else ''}")


def one_line(text: str) -> str:
    return " ".join(text.split())
