"""The key/value cache of one worker: blocks on the device, blocks in host memory, and the copies between them.

Knows nothing of sequences: the scheduler says which block goes where. All layers of a kind live in one tensor

    store [num_layers, 2 (key, value), num_blocks, num_kv_heads, block_size, head_size]

so that moving a block moves it in every layer with one call, while a layer's key cache is still one contiguous
`[num_blocks, num_kv_heads, block_size, head_size]`: the tokens that one head attends to lie next to each other. With
latent attention values are the beginning of keys, and there is nothing but keys: `[num_layers, 1, ...]`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.cache.cpu_moves import CpuMoves
from worker_svc.host.untouched import untouched_zeros
from worker_svc.models.config import ModelConfig

# Of a piece of a swap on a GPU. 0.7 ms on a PCIe 4.0 bus of 25 GB/s, for which the copies of a step may have to wait;
# small enough for that, and so large that the 10 us of its launches are a few parts in a hundred.
_PIECE_BYTES = 16 << 20
_AREAS = 2  # for pieces under way, each way: one on the bus, one gathered or scattered

Blocks = npt.NDArray[np.integer]


class CacheEngine:
    """Blocks of `block_size` tokens; a block id names the same block in every layer.

    Attributes:
        store: all of the device's; see above.
        layers: its parts, (keys, values) of each layer.
    """

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
        block = config.num_kv_heads, block_size, config.head_size
        shape = (config.num_layers, _num_parts(config), num_device_blocks, *block)
        self._moves: BlockMoves
        if torch.device(device).type == "cpu":
            store = untouched_zeros(shape, dtype)
            self._moves = CpuMoves(store, num_host_blocks)
        else:
            from worker_svc.cache.cuda_moves import CudaMoves  # a compiler of kernels that a CPU worker has no need of

            store = torch.zeros(shape, dtype=dtype, device=device)
            self._moves = CudaMoves(store, num_host_blocks, _PIECE_BYTES, _AREAS)
        self.store = store
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [
            (layer[0], layer[1] if len(layer) == 2 else layer[0][..., : config.gathered_size]) for layer in store
        ]

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one block over all layers."""
        numbers = _num_parts(config) * config.num_layers * config.num_kv_heads * block_size * config.head_size
        return numbers * dtype.itemsize

    @staticmethod
    def staging_bytes(block_bytes: int) -> int:
        """Bytes of a GPU that the swaps of such blocks take beside the cache."""
        return 2 * _AREAS * max(_PIECE_BYTES, block_bytes)

    def copy(self, pairs: torch.Tensor) -> None:
        """Device to device; `pairs` i64[n, 2] of (source, destination) in host memory, no block being both."""
        self._moves.copy(pairs)

    def swap_out(self, pairs: torch.Tensor) -> None:
        """Device to host; `pairs` i64[n, 2] of (device block, host block), in host memory."""
        self._moves.swap_out(pairs)

    def swap_in(self, pairs: torch.Tensor) -> None:
        """Host to device; `pairs` i64[n, 2] of (host block, device block), in host memory."""
        self._moves.swap_in(pairs)

    @property
    def are_swaps_under_way(self) -> bool:
        """Whether a step may have to wait for some of its blocks: without `hold_steps` it would not."""
        return self._moves.are_under_way

    def hold_steps(self, read: Blocks, written: Blocks) -> None:
        """Has what is computed from now on wait for the swaps of these device blocks, and for no others.

        Call it before a step is launched: `read` and `written` i64[n] are the blocks that it reads and writes.
        """
        self._moves.hold_steps(read, written)


def _num_parts(config: ModelConfig) -> int:
    """Of a layer in a store."""
    return 2 if config.style.latent is None else 1


class BlockMoves(Protocol):
    """What a kind of device does for `CacheEngine`."""

    def copy(self, pairs: torch.Tensor) -> None:
        """As `CacheEngine.copy`."""

    def swap_out(self, pairs: torch.Tensor) -> None:
        """As `CacheEngine.swap_out`."""

    def swap_in(self, pairs: torch.Tensor) -> None:
        """As `CacheEngine.swap_in`."""

    @property
    def are_under_way(self) -> bool:
        """As `CacheEngine.are_swaps_under_way`."""

    def hold_steps(self, read: Blocks, written: Blocks) -> None:
        """As `CacheEngine.hold_steps`."""
