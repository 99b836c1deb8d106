"""What threads that run the same compiled function need to work together: counters and a barrier.

All of it works on one int64 array that the threads share. A thread that waits spins for a moment
and then gives its core away again and again, so that another process's work goes on.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.simd import Emitter, intrinsic, result_of

_SPINS_BEFORE_YIELD = 2000
_YIELD = "hexlm_yield_core"
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_compiled: Any = numba.njit(nogil=True)


def _register_yield() -> None:
    """Compiled code finds the function by this name, also when it comes from the disk's cache."""
    if sys.platform == "win32":
        function = ctypes.WinDLL("kernel32").SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    llvm.add_symbol(_YIELD, ctypes.cast(function, ctypes.c_void_p).value)


_register_yield()


@intrinsic
def fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    """The int64 at the address before `value` was added to it, atomically."""

    def emit(e: Emitter, arguments: Sequence[Any]) -> Any:
        pointer = e.pointer(arguments[0], e.i64(0), ir.IntType(64))
        return e.b.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return result_of(types.int64(types.int64, types.int64), emit)


@intrinsic
def _load(typing_context: Any, address: Any) -> Any:
    def emit(e: Emitter, arguments: Sequence[Any]) -> Any:
        pointer = e.pointer(arguments[0], e.i64(0), ir.IntType(64))
        return e.b.load_atomic(pointer, "acquire", 8)

    return result_of(types.int64(types.int64), emit)


@intrinsic
def _yield_core(typing_context: Any) -> Any:
    def emit(e: Emitter, arguments: Sequence[Any]) -> None:
        function_type = ir.FunctionType(ir.IntType(32), [])
        e.b.call(cgutils.get_or_insert_function(e.b.module, function_type, _YIELD), [])

    return result_of(types.void(), emit)


@intrinsic
def ticks(typing_context: Any) -> Any:
    """A counter of this machine that goes at one pace: the time stamp counter, or ARM's timer."""

    def emit(e: Emitter, arguments: Sequence[Any]) -> Any:
        name = "llvm.readcyclecounter" if _IS_X86 else "llvm.readsteadycounter"
        function_type = ir.FunctionType(ir.IntType(64), [])
        return e.b.call(cgutils.get_or_insert_function(e.b.module, function_type, name), [])

    return result_of(types.int64(), emit)


@_compiled
def wait_for_all(address: int, num_threads: int, num_barriers: int) -> int:
    """Returns when all threads have come here `num_barriers + 1` times; the new number.

    `address`: of an int64 that was 0 before the first of them came.
    """
    fetch_add(address, 1)
    wanted = (num_barriers + 1) * num_threads
    spins = 0
    while _load(address) < wanted:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _yield_core()
    return num_barriers + 1
