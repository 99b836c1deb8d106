"""What the QNN provider's messages stand for, as errors of ours. Pure text in, types out.

The provider raises generic errors and tells the reason in its log, so both are looked at. The
marks are names of return codes and messages in the provider's binary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.errors import ContextRejected, DeviceError, DeviceFull, DeviceLost

_REASON = re.compile(r"Operator type: (\S+) Node name: (.*?) Node index.*?REASON : (.*?)\s*$", re.S)
_LEFT_TO_THE_CPU = "assigned to the default CPU EP"
_NO_BACKEND = "SetupBackend failed"
_NO_DEVICE = "Failed to create device"
_LOST = ("NPU crashed", "SSR", "QNN_COMMON_ERROR_SYSTEM", "ENGINE_ERROR", "DEVICE_RESET")
_FULL = ("MEM_ALLOC", "MEMORY_ALLOCATION", "rpcmem_alloc", "out of memory", "bad_alloc")
_CONTEXT = ("contextCreateFromBinary", "EpContext model", "ep_cache_context", "EPContext")


def run_error(message: str) -> type[DeviceError]:
    """Which error a failed run stands for."""
    return DeviceLost if any(mark in message for mark in _LOST) else DeviceError


def open_error(text: str) -> type[DeviceError]:
    """Which error a failed opening stands for, by all its messages."""
    if any(mark in text for mark in _FULL):
        return DeviceFull
    if any(mark in text for mark in _LOST):
        return DeviceLost
    if any(mark in text for mark in _CONTEXT):
        return ContextRejected
    return DeviceError


def is_refusal(text: str) -> bool:
    """Whether a graph was not opened because nodes were left to the CPU, and not because QNN
    itself could not be set up, after which all of them are."""
    return _LEFT_TO_THE_CPU in text and _NO_BACKEND not in text


def has_no_device(text: str) -> bool:
    """Whether QNN or the driver does not know the chip."""
    return _NO_DEVICE in text


def refusals(messages: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(operator and node, reason) of the verbose log, each once."""
    found: dict[tuple[str, str], None] = {}
    for message in messages:
        if match := _REASON.search(message):
            operator, node, reason = (part.strip() for part in match.groups())
            found[f"{operator} {node}".strip(), " ".join(reason.split())] = None
    return tuple(found)


def first_line(messages: Sequence[str], failure: BaseException) -> str:
    """The provider's own words if it logged any: the exception is often about what follows."""
    text = messages[0] if messages else str(failure)
    return text.splitlines()[0] if text else type(failure).__name__
