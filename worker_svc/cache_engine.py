"""The key/value cache of one worker: blocks on the device, blocks in host memory, and the copies between them.

Knows nothing of sequences: the scheduler says which block goes where. All layers of a kind live in one tensor

    store [num_layers, 2 (key, value), num_blocks, num_kv_heads, block_size, head_size]

so that moving a block moves it in every layer with one call, while a layer's key cache is still one contiguous
`[num_blocks, num_kv_heads, block_size, head_size]`: the tokens that one head attends to lie next to each other.
"""

from __future__ import annotations

import math
import mmap

import torch

from kernels import reference
from worker_svc.models.config import ModelConfig


class CacheEngine:
    """Blocks of `block_size` tokens; a block id names the same block in every layer."""

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks

        def store(num_blocks: int, where: str | torch.device, pinned: bool = False) -> torch.Tensor:
            shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_size)
            if torch.device(where).type == "cpu" and not pinned and num_blocks:
                return _untouched_zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=where, pin_memory=pinned)

        self._device_store = store(num_device_blocks, device)
        self._host_store = store(num_host_blocks, "cpu", pinned=torch.device(device).type == "cuda")
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [(layer[0], layer[1]) for layer in self._device_store]

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one block over all layers."""
        return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_size * dtype.itemsize

    def copy(self, pairs: torch.Tensor) -> None:
        """Device to device; `pairs` i64[n, 2] of (source, destination), no block being both."""
        _copy_blocks(self._device_store, self._device_store, pairs)

    def swap_out(self, pairs: torch.Tensor) -> None:
        """Device to host; `pairs` i64[n, 2] of (device block, host block)."""
        _copy_blocks(self._device_store, self._host_store, pairs)

    def swap_in(self, pairs: torch.Tensor) -> None:
        """Host to device; `pairs` i64[n, 2] of (host block, device block)."""
        _copy_blocks(self._host_store, self._device_store, pairs)


def _copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """`reference.copy_blocks`; block by block on the CPU, where a gather and a scatter of strided blocks are slow.

    64 blocks of SmolLM2's shape on one 2.5 GHz Xeon core: 31 ms gathered, 4.7 ms one by one.
    """
    if source.device.type != "cpu" or destination.device.type != "cpu":
        reference.copy_blocks(source, destination, pairs)
        return
    for from_block, to_block in pairs.tolist():
        destination[:, :, to_block].copy_(source[:, :, from_block])


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages the system provides at their first use.

    `torch.zeros` touches every page at once: 1.5 s a GiB on a virtual machine, most of a worker's way to readiness.
    Whether the memory is there has been checked before (`cache_sizing`).
    """
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
