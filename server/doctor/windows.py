"""What only Windows can be asked: the machine's own architecture and the NPU's driver.

Everywhere else both answers are None.
"""

from __future__ import annotations

import sys

# The device class "Neural processors" (GUID_DEVCLASS_COMPUTEACCELERATOR of the Windows SDK).
_NPU_CLASS = r"SYSTEM\CurrentControlSet\Control\Class\{f01a9d53-3ff6-48d2-9f97-c8a7004be10c}"
_MACHINES = {0x8664: "x86_64", 0xAA64: "arm64"}


def native_arch() -> str | None:
    """The machine's, also when this process is emulated (IsWow64Process2)."""
    if sys.platform != "win32":
        return None
    import ctypes

    process, machine = ctypes.c_ushort(), ctypes.c_ushort()
    kernel = ctypes.windll.kernel32
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    current = ctypes.c_void_p(kernel.GetCurrentProcess())
    if not kernel.IsWow64Process2(current, ctypes.byref(process), ctypes.byref(machine)):
        return None
    return _MACHINES.get(machine.value)


def npu_driver() -> tuple[str, str] | None:
    """(name, version) of the first driver for a neural processor."""
    if sys.platform != "win32":
        return None
    import winreg

    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _NPU_CLASS + r"\0000") as key:
            name, version = (
                str(winreg.QueryValueEx(key, value)[0]) for value in ("DriverDesc", "DriverVersion")
            )
    except OSError:
        return None
    return name, version
