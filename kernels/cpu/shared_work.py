"""Work that the threads of one parallel loop share as it comes, piece by piece.

All threads of a loop go through the same phases. A phase has items 0..n. A thread takes those of its own share first,
as they lie in memory, and then what is left of the shares of the others:

    items      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15     thread 1 lost its core to somebody while it had item 9:
    thread 0   0 1 2 3 4 5 6 7  10 11 12 13 14 15          thread 0 has done all the rest before it is back
    thread 1   8 9 ...

A phase is over when its items are done, whoever did them. So nobody waits for a thread, only for an item that somebody
is working on: phases end, too, where the pool has fewer threads than the loop was cut for, down to one that does the
parts of all in turn. Which thread does an item must not change its result.

Who waits looks for a while and then sleeps in the kernel, so that a thread whose item is missing may have the core.
A phase of two empty items takes 0.14 us on two Zen 5 cores, a loop of its own 1.1 where no thread has to be woken.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from kernels.cpu import runtime  # noqa: F401 - sets where compiled code is kept
from kernels.cpu.vectors.numbers import address_of
from kernels.cpu.vectors.vector_code import intrinsic

# Looks before a waiting thread sleeps, 15 ns each: longer than most items take, and less than waking a thread costs
# where a core without work is given back to a hypervisor.
LOOKS = 4_000

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_COUNTER_BYTES = 4
_PAUSE = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}.get(platform.machine())
# Of the system call `futex`; elsewhere a thread that waits hands its core over and looks again.
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # of one process alone
_EVERYBODY = 0x7FFFFFFF


@njit(nogil=True)
def counters(threads, phases):  # type: ignore[no-untyped-def]
    """Counters of one loop, an int32 each: for every thread the items taken of its share, phase by phase;
    then the items done, phase by phase; then how many threads sleep."""
    return np.zeros((threads + 1) * phases + 1, dtype=np.int32)


def shared(do: Any) -> Any:
    """A compiled function `(team, phase, num_items, arguments)`: a thread's part in a phase.

    It calls the compiled `do(item, end, *arguments)` for each item that the thread takes; those up to `end` are likely
    to come next. It returns when no item is left to take. `team`: what `counters` gave, the thread, how many there are.
    """

    @njit(nogil=True)
    def share(team, phase, num_items, arguments):  # type: ignore[no-untyped-def]
        counts, thread, threads = team
        start = address_of(counts)
        phases = counts.size // (threads + 1)
        num_done = 0
        for turn in range(threads):
            owner = (thread + turn) % threads
            first, end = num_items * owner // threads, num_items * (owner + 1) // threads
            taken = start + (owner * phases + phase) * _COUNTER_BYTES
            if first + _read(taken) >= end:
                continue
            item = first + _add(taken, 1)
            while item < end:
                do(item, end, *arguments)
                num_done += 1
                item = first + _add(taken, 1)
        if num_done == 0:
            return
        done = start + (threads * phases + phase) * _COUNTER_BYTES
        if _add(done, num_done) + num_done == num_items and _read(_sleepers(counts)) > 0:
            _wake(done)

    return share


@njit(nogil=True)
def wait(team, phase, num_items):  # type: ignore[no-untyped-def]
    """Returns when all items of a phase are done; what was written by then can be read. `team`: see `shared`."""
    counts, _, threads = team
    phases = counts.size // (threads + 1)
    done = address_of(counts) + (threads * phases + phase) * _COUNTER_BYTES
    for _ in range(LOOKS):
        if _read(done) == num_items:
            return
        _pause()
    sleepers = _sleepers(counts)
    _add(sleepers, 1)
    while True:
        num_done = _read(done)
        if num_done == num_items:
            break
        _sleep(done, num_done)
    _add(sleepers, -1)


@njit(nogil=True)
def _sleepers(counts):  # type: ignore[no-untyped-def]
    return address_of(counts) + (counts.size - 1) * _COUNTER_BYTES


@intrinsic
def _add(typing_context: Any, address: Any, amount: Any) -> Any:
    """Adds to the int32 at `address`; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _INT32.as_pointer())
        before = builder.atomic_rmw("add", place, builder.trunc(arguments[1], _INT32), "seq_cst")
        return builder.sext(before, _INT64)

    return types.int64(types.intp, types.int64), generate


@intrinsic
def _read(typing_context: Any, address: Any) -> Any:
    """The int32 at `address`, and after it nothing that was written before it was set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _INT32.as_pointer())
        return builder.sext(builder.load_atomic(place, "seq_cst", _COUNTER_BYTES), _INT64)

    return types.int64(types.intp), generate


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Tell the processor that this thread only looks."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _PAUSE is not None:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, _PAUSE), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _sleep(typing_context: Any, address: Any, value: Any) -> Any:
    """Sleep until woken by `_wake`, unless the int32 at `address` is no longer `value`; may end early."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _FUTEX is None:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INT32, []), "sched_yield")
            builder.call(function, [])
        else:
            _system_call(builder, [_INT64(_FUTEX), arguments[0], _INT64(_FUTEX_WAIT), arguments[1], _INT64(0)])
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@intrinsic
def _wake(typing_context: Any, address: Any) -> Any:
    """Wake all threads that sleep at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _FUTEX is not None:
            _system_call(builder, [_INT64(_FUTEX), arguments[0], _INT64(_FUTEX_WAKE), _INT64(_EVERYBODY), _INT64(0)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _system_call(builder: Any, arguments: list[Any]) -> None:
    kind = ir.FunctionType(_INT64, [_INT64], var_arg=True)
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "syscall"), arguments)
