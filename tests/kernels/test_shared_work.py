"""Items that threads take as they come: each is done once, whoever is slow, and phases begin one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit, prange, set_num_threads

from kernels.cpu.runtime import num_threads
from kernels.cpu.shared_work import counters, shared, wait

PHASES = 7


@njit(nogil=True)
def _count(item: Any, end: Any, phase: Any, times: Any, early: Any, num_items: Any, delay: Any) -> None:
    if phase > 0:
        for i in range(num_items):
            early[0] += times[phase - 1, i] != 1
    turns = 1.0
    for _ in range(delay):
        turns = turns * 1.0000001 + 1e-9
    times[phase, item] += 1 if turns > 0.0 and item < end <= num_items else 100


_count_shared = shared(_count)


@njit(nogil=True, parallel=True)
def _run(threads: Any, num_items: Any, slow: Any, late: Any, times: Any, early: Any) -> None:
    counts = counters(threads, times.shape[0])
    for thread in prange(threads):
        turns = 1.0
        if thread == late:
            for _ in range(slow):
                turns = turns * 1.0000001 + 1e-9
        for phase in range(times.shape[0]):
            delay = slow if thread == slow % threads and phase == 1 and turns > 0.0 else 0
            _count_shared((counts, thread, threads), phase, num_items, (phase, times, early, num_items, delay))
            wait((counts, thread, threads), phase, num_items)


@pytest.mark.parametrize("slow", [0, 3_000_000], ids=["all the same", "one slow"])
@pytest.mark.parametrize("num_items", [0, 1, 2, 17, 400])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_item_is_done_once_and_after_the_phase_before_it(threads: int, num_items: int, slow: int) -> None:
    """8 threads are more than there are threads: some run after others are through."""
    set_num_threads(num_threads())
    for late in (0, threads - 1):
        times, early = np.zeros((PHASES, num_items), dtype=np.int64), np.zeros(1, dtype=np.int64)
        _run(threads, num_items, slow if num_items in (1, 17) else 0, late, times, early)
        assert (times == 1).all() and early[0] == 0
