"""How this machine's chip calls itself, in the operating system's words.

The names are only collected here; what they mean is said by `configs/devices`.
"""

from __future__ import annotations

import sys
from pathlib import Path

_LINUX_FILES = (
    "/sys/devices/soc0/machine",
    "/proc/device-tree/model",
    "/proc/device-tree/compatible",
)
_WINDOWS_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def reported_chip() -> str:
    """All names that are found, in one line; "" where there are none. Never raises."""
    names = _windows_names() if sys.platform == "win32" else _linux_names()
    return " | ".join(dict.fromkeys(name for name in names if name))


def _windows_names() -> list[str]:
    if sys.platform != "win32":
        return []
    import winreg

    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _WINDOWS_KEY) as key:
            return [str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()]
    except OSError:
        return []


def _linux_names(files: tuple[str, ...] = _LINUX_FILES) -> list[str]:
    names = [_text(Path(file)) for file in files]
    return [*names, *dict.fromkeys(_cpu_names(_text(Path("/proc/cpuinfo"))))]


def _cpu_names(cpuinfo: str) -> list[str]:
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    return [value.strip() for key, _, value in pairs if key.strip() in ("model name", "Hardware")]


def _text(path: Path) -> str:
    """A device tree separates and ends its strings with NUL."""
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
    return text.replace("\0", " ").strip()
