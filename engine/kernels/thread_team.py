"""What threads that run the same compiled function need to work together: turns, and waiting.

Work is items that threads take in turn. A thread begins with those of its own stretch, so that each
reads memory in one stream, and then helps the others. It waits for work and never for a thread: who
comes late finds what was done without it, and goes on. All of it works on int64 that the threads
share, each in a cache line of its own. A thread that waits spins for a moment and then gives its
core away again and again, so that another process's work goes on.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.compiled import compiled
from engine.kernels.simd import Emitter, intrinsic, result_of

COUNTER_BYTES = 64  # a cache line
_SPINS_BEFORE_YIELD = 2000
_YIELD = "hexlm_yield_core"
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


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


@compiled
def wait_for(address: int, wanted: int) -> None:
    """Returns when the int64 at the address is at least so large."""
    spins = 0
    while _load(address) < wanted:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _yield_core()


class Turns(NamedTuple):
    """Of thread `part` of `num_threads` at some items. `counters`: the address of one for each
    thread, 0 before the first of them took anything (`COUNTER_BYTES`)."""

    part: int
    num_threads: int
    counters: int


class Item(NamedTuple):
    """`number`: -1 if there are no more. `stretch`: whose it is, counted from the thread's own."""

    stretch: int
    number: int


@compiled
def next_item(turns: Turns, stretch: int, num_items: int) -> Item:
    """What this thread is to do next. `stretch`: that of its last item, or 0."""
    count = turns.num_threads
    while stretch < count:
        whose = (turns.part + stretch) % count
        begin = (whose * num_items + count - 1) // count
        end = ((whose + 1) * num_items + count - 1) // count
        if begin < end:
            number = begin + fetch_add(turns.counters + COUNTER_BYTES * whose, 1)
            if number < end:
                return Item(stretch, number)
        stretch += 1
    return Item(stretch, -1)


@compiled
def num_chunks(num_items: int, size: int) -> int:
    """Of `size` items, or fewer for the last one."""
    return (num_items + size - 1) // size
