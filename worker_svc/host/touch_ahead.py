"""Makes the system provide the memory of a CPU cache before a step writes to it, while no step runs.

The first write to a page waits until the system has found memory for it and cleared it, and on a virtual machine until
the host has done the same: of SmolLM2-135M on two cores a second of processor time for the 370 MB that 32 sequences of
230 tokens need, within the steps that the first requests wait for. So a thread touches it, a piece at a time, once no
step has arrived for a moment. Contents do not change. A cache that is not used all the same keeps most of its pages
untouched.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterator

import torch

AHEAD_BYTES = 512 << 20  # the most that is touched; a scheduler uses blocks with low ids first
PIECE_BYTES = 2 << 20  # a step that arrives waits for no more
_QUIET_S = 0.05  # without a step, before the next pieces
_MADV_POPULATE_WRITE = 23  # of Linux 5.14 and later


class TouchAhead:
    """A thread that ends when all is there, when the system refuses, or at `stop`."""

    def __init__(self, store: torch.Tensor, num_steps: Callable[[], int | None]) -> None:
        """
        Args:
            store: [layers, parts, num_blocks, ...], memory of a `CacheEngine` on a CPU.
            num_steps: how many steps have arrived so far; None while one runs.
        """
        self._store, self._num_steps = store, num_steps
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="touch ahead", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the cache is not held any more."""
        self._ended.set()
        self._thread.join()
        del self._store

    def _run(self) -> None:
        seen = None
        for address, num_bytes in _pieces(self._store):
            while (now := self._num_steps()) is None or now != seen:
                seen = now
                if self._ended.wait(_QUIET_S):
                    return
            if self._ended.is_set() or not provide(address, num_bytes):
                return


def _pieces(store: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Addresses and bytes: the first blocks of every layer's keys and values before any later ones."""
    parts = store.flatten(0, 1)
    most = min(parts[0].nbytes, AHEAD_BYTES // len(parts))
    for start in range(0, most, PIECE_BYTES):
        for part in parts:
            yield part.data_ptr() + start, min(PIECE_BYTES, most - start)


def provide(address: int, num_bytes: int) -> bool:
    """Makes the system provide the pages of these bytes, whose contents stay; False where it does not. Other
    threads run meanwhile."""
    if sys.platform != "linux":
        return False
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return bool(madvise(start, address + num_bytes - start, _MADV_POPULATE_WRITE) == 0)
