"""Each thread of the calling thread's pool kept on a core of its own.

A system may move a computing thread to another core, whose caches know nothing of what it reads, or put two of them on
one core for a while. The pool is torch's, too (see `runtime`). Threads that other threads start later, as those of
gRPC, are not in it and stay free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit, prange, types

from kernels.cpu import runtime
from kernels.cpu.vectors.numbers import address_of

_MOST_CORES = 1024  # glibc's cpu_set_t
_WORD_BITS = 64

_sched_setaffinity = types.ExternalFunction("sched_setaffinity", types.intc(types.intc, types.uintp, types.uintp))
_gettid = types.ExternalFunction("gettid", types.intc())


def pin_threads(cores: Sequence[int]) -> list[int]:
    """Keeps thread i of as many as `cores` has, the calling one first, on core `cores[i]`; their ids.

    To be called after the number of threads was set. Raises ValueError where the pool has another number of threads, or
    a core is not among those that may be used.
    """
    if len(cores) != runtime.num_threads():
        raise ValueError(f"{len(cores)} cores for {runtime.num_threads()} threads")
    thread_ids = np.zeros(len(cores), dtype=np.int64)
    failed = _pin(np.array(cores, dtype=np.int64), thread_ids)
    if failed >= 0:
        raise ValueError(f"core {cores[failed]} may not be used")
    if len(set(thread_ids.tolist())) < len(cores):
        raise RuntimeError(f"a pool of {len(cores)} threads computed with fewer")
    return list(thread_ids.tolist())


@njit(parallel=True, cache=True)
def _pin(cores, thread_ids):  # type: ignore[no-untyped-def]
    """Index of a core on which no thread may run; -1: all is done."""
    errors = np.zeros(cores.size, dtype=np.int64)
    for thread in prange(cores.size):
        thread_ids[thread] = _gettid()
        errors[thread] = _pin_this_thread(cores[thread])
    for thread in range(cores.size):
        if errors[thread] != 0:
            return thread
    return -1


@njit
def _pin_this_thread(core):  # type: ignore[no-untyped-def]
    if core >= _MOST_CORES:
        return -1
    mask = np.zeros(_MOST_CORES // _WORD_BITS, dtype=np.uint64)
    mask[core // _WORD_BITS] = np.uint64(1) << np.uint64(core % _WORD_BITS)
    return _sched_setaffinity(0, mask.nbytes, address_of(mask))
