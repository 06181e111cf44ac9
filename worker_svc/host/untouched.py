"""Memory that the system provides when it is first used."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

_PAGE_BYTES = 2 << 20


def untouched_bytes(num_bytes: int) -> torch.Tensor:
    """u8[num_bytes], zeros; pages that are never touched take no memory. They have 2 MiB where the system gives such,
    and the tensor begins with one."""
    whole = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
    memory = mmap.mmap(-1, whole + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = np.frombuffer(memory, dtype=np.uint8)
    start = -numbers.ctypes.data % _PAGE_BYTES
    return torch.from_numpy(numbers[start : start + num_bytes])
