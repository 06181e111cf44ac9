"""Copies and swaps of cache blocks on a GPU; swaps have a stream of their own, and steps go on while they run.

    compute  ... step N ─┬─────────── waits ─────┬─ step N + 1, which may overwrite the blocks ...
                         │                       │
    swaps                └─ gather ─ event ──────┘
                                        └─ transfer to the host ...

Swaps run in the order in which they were submitted, so a block that comes back is whole on the host. A block that is
swapped out is free for the compute stream once it has been gathered, one that is swapped in once it is scattered.
"""

from __future__ import annotations

import torch

from kernels.gpu.copy_blocks import copy_blocks
from kernels.gpu.swap_blocks import block_major, on_device, swap_blocks


class CudaMoves:
    """A cache's blocks in pinned host memory, and their ways there and back. No call waits for the device."""

    def __init__(self, cache: torch.Tensor, num_host_blocks: int, staging_bytes: int) -> None:
        """`cache` [layers, 2, num_blocks, num_kv_heads, block_size, head_size] on a CUDA device, where at most
        `staging_bytes`, or one block, are taken for what is under way."""
        layers, parts, _, *block = cache.shape
        block_bytes = layers * parts * cache[0, 0, :1].numel() * cache.itemsize
        num_staged = min(num_host_blocks, max(1, staging_bytes // block_bytes))
        self._cache = cache
        self._host = block_major((layers, parts, num_host_blocks, *block), cache.dtype, "cpu", pinned=True)
        self._staging = block_major((layers, parts, num_staged, *block), cache.dtype, cache.device)
        self._stream = torch.cuda.Stream(cache.device)

    def copy(self, pairs: torch.Tensor) -> None:
        """See `CacheEngine.copy`; on the compute stream."""
        copy_blocks(self._cache, self._cache, on_device(pairs, self._cache.device))

    def swap_out(self, pairs: torch.Tensor) -> None:
        """See `CacheEngine.swap_out`."""
        self._swap(self._cache, self._host, pairs)

    def swap_in(self, pairs: torch.Tensor) -> None:
        """See `CacheEngine.swap_in`."""
        self._swap(self._host, self._cache, pairs)

    def _swap(self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
        compute = torch.cuda.current_stream(self._cache.device)
        self._stream.wait_stream(compute)
        is_done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            swap_blocks(source, destination, pairs, self._staging, when_done=lambda: is_done.record(self._stream))
        compute.wait_event(is_done)
