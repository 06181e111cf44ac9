"""Memory that the system provides when it is first used."""

from __future__ import annotations

import mmap

import torch


def untouched_bytes(num_bytes: int) -> torch.Tensor:
    """u8[num_bytes], zeros, from the start of a page on; pages that are never touched take no memory."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
