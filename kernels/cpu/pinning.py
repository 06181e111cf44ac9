"""Each computing thread kept on a core of its own.

A system may move a computing thread to another core, whose caches know nothing of what it reads, or put two of them on
one core for a while. These are the calling thread and the library's own; torch's and those of gRPC stay free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cpu.library import library, num_threads


def pin_threads(cores: Sequence[int]) -> list[int]:
    """Keeps thread i of as many as `cores` has, the calling one first, on core `cores[i]`; their ids.

    To be called after the number of threads was set. Raises ValueError where another number of threads computes, or a
    core is not among those that may be used.
    """
    if len(cores) != num_threads():
        raise ValueError(f"{len(cores)} cores for {num_threads()} threads")
    wanted, thread_ids = torch.tensor(cores, dtype=torch.int64), torch.zeros(len(cores), dtype=torch.int64)
    failed = library().pin_threads(wanted.data_ptr(), thread_ids.data_ptr(), len(cores))
    if failed >= 0:
        raise ValueError(f"core {cores[failed]} may not be used")
    if 0 in thread_ids:
        raise RuntimeError(f"of {len(cores)} threads only {int(thread_ids.count_nonzero())} came")
    return list(thread_ids.tolist())
