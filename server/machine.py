"""What this machine offers: cores and memory, each with the sentence that says how it was found.

Looks at limits of containers too, since psutil reports the host's. Knows nothing of models.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

KV_MEMORY_SHARE = 0.25
"""The part of the available memory that KV pages take by default. The rest is left for the
weights, the graphs' own buffers and the user's other programs."""

MIN_KV_MEMORY_BYTES = 64 * 1024**2
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Detected:
    """A detected default and why it is that."""

    value: int
    reason: str


def detect_threads() -> Detected:
    """Physical cores that this process may use; a sibling thread adds nothing to matrix work."""
    allowed = _allowed_cpus()
    physical = psutil.cpu_count(logical=False) or allowed
    quota = _cgroup_cpu_quota()
    num_threads = max(1, min(allowed, physical, quota or allowed))
    reason = f"{physical} physical cores, {allowed} allowed to this process"
    return Detected(num_threads, reason + (f", container quota {quota}" if quota else ""))


def detect_kv_memory(num_models: int = 1) -> Detected:
    """Bytes of KV pages for each of `num_models` engines."""
    available = available_memory_bytes()
    share = int(available * KV_MEMORY_SHARE) // max(1, num_models)
    value = max(MIN_KV_MEMORY_BYTES, share)
    among = f", shared by {num_models} models" if num_models > 1 else ""
    return Detected(
        value, f"{KV_MEMORY_SHARE:.0%} of {format_bytes(available)} available memory{among}"
    )


def available_memory_bytes() -> int:
    available = int(psutil.virtual_memory().available)
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used))


def format_bytes(num_bytes: int) -> str:
    """Bytes for people: "812 MiB", "1.5 GiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _allowed_cpus() -> int:
    if sys.platform != "win32" and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_cpu_quota() -> int | None:
    text = _cgroup_text("cpu.max").split()
    if len(text) != 2 or not all(part.isdecimal() for part in text):
        return None
    return max(1, math.ceil(int(text[0]) / int(text[1])))


def _cgroup_number(name: str) -> int | None:
    text = _cgroup_text(name)
    return int(text) if text.isdecimal() else None


def _cgroup_text(name: str) -> str:
    """The file's text, or "" where there are no control groups."""
    try:
        return (_CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""
