"""Memory that the system provides when it is first used."""

from __future__ import annotations

import math
import mmap

import torch


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, from the start of a page on; pages that are never touched take no memory.

    `torch.zeros` touches every page at once: 1.5 s a GiB on a virtual machine, for a cache most of a worker's way to
    readiness. Whether there is memory for all of it is for the caller to know.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)
