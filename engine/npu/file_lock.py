"""Locks on single bytes of an open file, between processes: POSIX record locks, Windows LockFileEx.

The operating system releases them when the process ends, however it ends. Both wait inside the
kernel, without polling. What is locked are bytes far behind the file's contents, which nobody
reads or writes (on Windows that would be refused).
"""

from __future__ import annotations

import sys
from typing import Any

if sys.platform == "win32":  # pragma: no cover - the other branch is what Linux runs
    import ctypes
    import msvcrt
    from ctypes import wintypes

    _EXCLUSIVE = 2

    class _Overlapped(ctypes.Structure):
        _fields_ = [
            ("Internal", ctypes.c_size_t),
            ("InternalHigh", ctypes.c_size_t),
            ("Offset", wintypes.DWORD),
            ("OffsetHigh", wintypes.DWORD),
            ("hEvent", wintypes.HANDLE),
        ]

    _kernel32: Any = ctypes.WinDLL("kernel32", use_last_error=True)

    def lock(file: int, first: int, count: int, *, shared: bool = False) -> None:
        """Waits until bytes first:first + count are free, and takes them. Raises OSError."""
        at = _Overlapped(0, 0, first & 0xFFFFFFFF, first >> 32, None)
        handle = wintypes.HANDLE(msvcrt.get_osfhandle(file))
        low, high = count & 0xFFFFFFFF, count >> 32
        flags = 0 if shared else _EXCLUSIVE
        if not _kernel32.LockFileEx(handle, flags, 0, low, high, ctypes.byref(at)):
            raise ctypes.WinError(ctypes.get_last_error())

    def unlock(file: int, first: int, count: int) -> None:
        """Exactly what one `lock` took. Raises OSError."""
        at = _Overlapped(0, 0, first & 0xFFFFFFFF, first >> 32, None)
        handle = wintypes.HANDLE(msvcrt.get_osfhandle(file))
        low, high = count & 0xFFFFFFFF, count >> 32
        if not _kernel32.UnlockFileEx(handle, 0, low, high, ctypes.byref(at)):
            raise ctypes.WinError(ctypes.get_last_error())

else:
    import fcntl

    def lock(file: int, first: int, count: int, *, shared: bool = False) -> None:
        """Waits until bytes first:first + count are free, and takes them. Raises OSError."""
        fcntl.lockf(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, count, first)

    def unlock(file: int, first: int, count: int) -> None:
        """Exactly what one `lock` took. Raises OSError."""
        fcntl.lockf(file, fcntl.LOCK_UN, count, first)
