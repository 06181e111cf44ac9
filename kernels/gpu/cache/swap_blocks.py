"""Blocks between a GPU's cache and pinned host memory, whatever their places, in few large transfers.

A block of the cache lies in as many pieces as there are layers, keys and values apart; a block of the host's store is
one piece (`block_major`), and neighbours are one. So a swap goes through areas on the device that are laid out as the
host's store is, as many blocks at a time as an area holds:

    cache [layers, 2, blocks, ...]  -- gather, one launch -->   area [blocks, layers, 2, ...]
                                    <-- scatter, one launch --    |  ^
                                                          to_host |  | from_host: one transfer a run of neighbours
                                                                  v  |
                                                             host [blocks, layers, 2, ...]

With latent attention there are only keys, and 1 stands in place of 2.

For a model of 32 layers, 8 heads of 128 and 16 tokens in bfloat16 that is one transfer of 2 MiB a block at least, in
place of 64 of 32 KiB. Everything here is enqueued on the current stream and waits for nothing; who waits for whom is
up to the caller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.gpu.cache.copy_blocks import copy_blocks


class Run(NamedTuple):
    """Blocks that are neighbours on the host, and in the area."""

    staged: int  # the first one's place in the area
    host: int  # the first one's place on the host
    length: int


class Piece(NamedTuple):
    """Blocks that are in an area at a time, in the order in which they stand there."""

    cached: torch.Tensor  # i64[n], in host memory: their places in the cache
    hosted: torch.Tensor  # i64[n], likewise: their places on the host, ascending
    runs: list[Run]


def block_major(
    shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, *, pinned: bool = False
) -> torch.Tensor:
    """Zeros of a store's shape [layers, parts, num_blocks, ...], in memory of the order [num_blocks, layers, ...]."""
    layers, parts, num_blocks, *block = shape
    store = torch.zeros((num_blocks, layers, parts, *block), dtype=dtype, device=device, pin_memory=pinned)
    return store.permute(1, 2, 0, 3, 4, 5)


def cut(cached: torch.Tensor, hosted: torch.Tensor, capacity: int) -> list[Piece]:
    """A swap of n > 0 blocks, `capacity` at a time; i64[n] their places in the cache and on the host."""
    order = hosted.argsort()  # by place on the host, so that neighbours meet
    both = zip(cached[order].split(capacity), hosted[order].split(capacity), strict=True)
    return [Piece(some, places, _runs(places.tolist())) for some, places in both]


def gather(cache: torch.Tensor, area: torch.Tensor, cached: torch.Tensor) -> None:
    """Blocks of the cache to the first places of an area. Raises ValueError for stores that do not fit."""
    _check_block_major(area, "area")
    copy_blocks(cache, area, on_device(torch.stack((cached, torch.arange(len(cached))), dim=1), area.device))


def scatter(area: torch.Tensor, cache: torch.Tensor, cached: torch.Tensor) -> None:
    """The first places of an area to blocks of the cache. Raises ValueError for stores that do not fit."""
    _check_block_major(area, "area")
    copy_blocks(area, cache, on_device(torch.stack((torch.arange(len(cached)), cached), dim=1), area.device))


def to_host(area: torch.Tensor, host: torch.Tensor, runs: list[Run]) -> None:
    """What was gathered to its places on the host. Raises ValueError for stores that do not fit."""
    _check_block_major(area, "area")
    _check_block_major(host, "host")
    for run in runs:
        _transfer(area, run.staged, host, run.host, run.length)


def from_host(host: torch.Tensor, area: torch.Tensor, runs: list[Run]) -> None:
    """Blocks of the host to the first places of an area. Raises ValueError for stores that do not fit."""
    _check_block_major(area, "area")
    _check_block_major(host, "host")
    for run in runs:
        _transfer(host, run.host, area, run.staged, run.length)


def _runs(host_blocks: list[int]) -> list[Run]:
    """Runs of neighbours among blocks in ascending order, which are staged one after the other."""
    found: list[Run] = []
    for staged, host in enumerate(host_blocks):
        if found and host == found[-1].host + found[-1].length:
            found[-1] = found[-1]._replace(length=found[-1].length + 1)
        else:
            found.append(Run(staged, host, 1))
    return found


def _check_block_major(store: torch.Tensor, name: str) -> None:
    if store.stride(1) != store[0, 0, :1].numel() or not store.shape[2]:
        raise ValueError(f"{name} is not of whole blocks, one or more: {tuple(store.shape)}, strides {store.stride()}")


def _transfer(source: torch.Tensor, first: int, destination: torch.Tensor, place: int, count: int) -> None:
    """One piece of memory to another, both block-major."""
    blocks = source.permute(2, 0, 1, 3, 4, 5)[first : first + count]
    destination.permute(2, 0, 1, 3, 4, 5)[place : place + count].copy_(blocks, non_blocking=True)


def on_device(pairs: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Taken there through pinned memory, so that nobody waits."""
    return pairs if device.type == "cpu" else pairs.pin_memory().to(device, non_blocking=True)
