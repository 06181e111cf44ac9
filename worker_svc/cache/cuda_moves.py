"""Copies and swaps of cache blocks on a GPU. Swaps go beside the steps: who needs a block waits for it, nobody else.

A swap goes in pieces of what an area on the device holds (`kernels.gpu.cache.swap_blocks`). Each way has some areas,
used in turn, and two streams, so that one piece is on the bus while the next one is gathered or the last one is
scattered:

    steps      ... step N │ step N + 1 ...                      steps      ... step N │ step N + 1 ...
    gathers               │ 1 │ 2 │   │ 3 │                     fetches    │  1  │  2  │   │  3  │
    stores                    │   1   │   2   │   3   │         scatters              │ 1 │ 2 │   │ 3 │

What a piece or a step comes after, as far as a block of its own was in the way:

    gathered from the cache    the steps so far, and a scatter to the block
    stored on the host         its gather, and a fetch that reads the block
    fetched from the host      a store that fills the block
    scattered to the cache     its fetch, the steps so far, and a gather that reads the block
    read by a step             a scatter to the block
    written by a step          a scatter to the block, and a gather that reads it

A piece also comes after the one that was in its area before. The small copies of steps, inputs and tokens, share the
bus: they are behind the pieces that are under way at most, not behind a swap.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from kernels.gpu.cache.copy_blocks import copy_blocks
from kernels.gpu.cache.swap_blocks import block_major, cut, from_host, gather, on_device, scatter, to_host
from worker_svc.host.timeline import Timeline

Blocks = npt.NDArray[np.integer]
_Moments = npt.NDArray[np.int64]


class CudaMoves:
    """A cache's blocks in pinned host memory, and their ways there and back. No call waits for the device.

    Where a call raises, the blocks that it was to write hold anything; the order of all else is kept.
    """

    def __init__(self, cache: torch.Tensor, num_host_blocks: int, area_bytes: int, num_areas: int) -> None:
        """`cache` [layers, parts, num_blocks, num_kv_heads, block_size, head_size] on a CUDA device, where `num_areas`
        each way, of at most `area_bytes` or one block, are taken for what is under way."""
        layers, parts, num_blocks, *block = cache.shape
        block_bytes = layers * parts * cache[0, 0, :1].numel() * cache.itemsize
        capacity = min(num_host_blocks, max(1, area_bytes // block_bytes))
        self._cache, self._capacity = cache, capacity
        self._host = block_major((layers, parts, num_host_blocks, *block), cache.dtype, "cpu", pinned=True)
        area_shape = (layers, parts, capacity, *block)
        outgoing, incoming = (
            [_Area(block_major(area_shape, cache.dtype, cache.device)) for _ in range(num_areas)] for _ in range(2)
        )
        self._areas_out, self._areas_in = cycle(outgoing), cycle(incoming)
        self._gathers, self._stores, self._fetches, self._scatters = (Timeline(cache.device) for _ in range(4))
        for timeline, areas in (
            (self._gathers, outgoing),
            (self._stores, outgoing),
            (self._fetches, incoming),
            (self._scatters, incoming),
        ):
            for area in areas:
                timeline.may_use(area.blocks)
        for timeline in (self._gathers, self._scatters):
            timeline.may_use(cache)
        # By block: the moment of that stream at which its last move is over.
        self._gathered, self._scattered = _moments(num_blocks), _moments(num_blocks)
        self._stored, self._fetched = _moments(num_host_blocks), _moments(num_host_blocks)

    def copy(self, pairs: torch.Tensor) -> None:
        """See `CacheEngine.copy`; on the stream of the steps."""
        self.hold_steps(pairs[:, 0].numpy(), pairs[:, 1].numpy())
        copy_blocks(self._cache, self._cache, on_device(pairs, self._cache.device))

    def swap_out(self, pairs: torch.Tensor) -> None:
        """See `CacheEngine.swap_out`."""
        self._gathers.wait_for_steps()
        for piece in cut(pairs[:, 0], pairs[:, 1], self._capacity):
            area, cached, hosted = next(self._areas_out), piece.cached.numpy(), piece.hosted.numpy()
            self._gathers.wait_for(self._scatters, _last(self._scattered, cached))
            self._gathers.wait_for(self._stores, area.left)
            with self._gathers.work() as moment:
                self._gathered[cached] = moment
                gather(self._cache, area.blocks, piece.cached)
            self._stores.wait_for(self._gathers, moment)
            self._stores.wait_for(self._fetches, _last(self._fetched, hosted))
            with self._stores.work() as moment:
                self._stored[hosted] = area.left = moment
                to_host(area.blocks, self._host, piece.runs)

    def swap_in(self, pairs: torch.Tensor) -> None:
        """See `CacheEngine.swap_in`."""
        self._scatters.wait_for_steps()
        for piece in cut(pairs[:, 1], pairs[:, 0], self._capacity):
            area, cached, hosted = next(self._areas_in), piece.cached.numpy(), piece.hosted.numpy()
            self._fetches.wait_for(self._stores, _last(self._stored, hosted))
            self._fetches.wait_for(self._scatters, area.left)
            with self._fetches.work() as moment:
                self._fetched[hosted] = moment
                from_host(self._host, area.blocks, piece.runs)
            self._scatters.wait_for(self._fetches, moment)
            self._scatters.wait_for(self._gathers, _last(self._gathered, cached))
            with self._scatters.work() as moment:
                self._scattered[cached] = area.left = moment
                scatter(area.blocks, self._cache, piece.cached)

    @property
    def are_under_way(self) -> bool:
        """See `CacheEngine.are_swaps_under_way`."""
        return not (self._gathers.is_idle and self._scatters.is_idle)

    def hold_steps(self, read: Blocks, written: Blocks) -> None:
        """See `CacheEngine.hold_steps`."""
        self._scatters.hold_steps(max(_last(self._scattered, read), _last(self._scattered, written)))
        self._gathers.hold_steps(_last(self._gathered, written))


class _Area:
    """Room on the device for a piece that is under way."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks
        self.left = 0  # the moment at which the last piece is out of it


def _moments(num_blocks: int) -> _Moments:
    return np.zeros(num_blocks, np.int64)


def _last(moments: _Moments, blocks: Blocks) -> int:
    """As later moments of a stream come after earlier ones, it is enough to wait for the last."""
    return int(moments[blocks].max(initial=0))
