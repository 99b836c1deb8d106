"""What is recorded of the machine and the programs, so that two runs can be told apart.

Holds no names of hosts or users and no paths.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from engine.version import own_version
from server.machine import detect_threads

PACKAGES = ("onnxruntime", "onnxruntime-qnn", "numba", "numpy")
_CPUINFO = Path("/proc/cpuinfo")
_WINDOWS_CPU = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "usable_threads": detect_threads().value,
        "memory_bytes": int(psutil.virtual_memory().total),
        "os": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "versions": {"hexlm": own_version(), **versions()},
    }


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """As the system calls it; the architecture's name where it does not say."""
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _WINDOWS_CPU) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return name_in(text) or platform.processor() or platform.machine()


def name_in(cpuinfo: str) -> str | None:
    """What /proc/cpuinfo has as the model's name; ARM kernels often give none."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else None
