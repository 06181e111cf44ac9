"""Blocks between a GPU's cache and pinned host memory, whatever their places, in few large transfers.

A block of the cache lies in as many pieces as there are layers, keys and values apart; a block of the host's store is
one piece (`block_major`), and neighbours are one. So a swap goes through a staging area on the device that is laid out
as the host's store is:

    cache [layers, 2, blocks, ...]  <- copy_blocks, one launch ->  staging [blocks, layers, 2, ...]
                                                                       ^
                                              one transfer a run of neighbouring host blocks
                                                                       v
                                                             host [blocks, layers, 2, ...]

For a model of 32 layers, 8 heads of 128 and 16 tokens in bfloat16 that is one transfer of 2 MiB a block at least, in
place of 64 of 32 KiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.gpu.copy_blocks import copy_blocks


class Run(NamedTuple):
    """Blocks that are neighbours on the host, and in the staging area."""

    staged: int  # the first one's place in the staging area
    host: int  # the first one's place on the host
    length: int


def block_major(
    shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, *, pinned: bool = False
) -> torch.Tensor:
    """Zeros of a store's shape [layers, 2, num_blocks, ...], in memory of the order [num_blocks, layers, 2, ...]."""
    layers, parts, num_blocks, *block = shape
    store = torch.zeros((num_blocks, layers, parts, *block), dtype=dtype, device=device, pin_memory=pinned)
    return store.permute(1, 2, 0, 3, 4, 5)


def swap_blocks(
    source: torch.Tensor,
    destination: torch.Tensor,
    pairs: torch.Tensor,
    staging: torch.Tensor,
    *,
    when_done: Callable[[], None] = lambda: None,
) -> None:
    """Enqueue on the current stream what `kernels.oracles.reference.copy_blocks` does; waits for nothing.

    One of source and destination is the host's store, block-major as `staging`, which is on the device of the other
    and holds as many blocks as are moved at once. pairs i64[n, 2], n > 0, in host memory. `when_done` is called as soon
    as nothing is left to be enqueued that reads or writes the cache: a transfer to the host may still be to come.
    Raises ValueError for stores that do not fit.
    """
    if is_block_major(source) == is_block_major(destination) or not is_block_major(staging) or not staging.shape[2]:
        raise ValueError(
            "swap_blocks: one of source and destination must be block-major, and staging, of a block or more"
        )
    if pairs.device.type != "cpu":
        raise ValueError(f"swap_blocks: pairs are on {pairs.device}; what is transferred is decided on the host")
    is_out = is_block_major(destination)
    ordered = pairs[pairs[:, int(is_out)].argsort()]  # by place on the host, so that neighbours meet
    cached, hosted = ordered[:, int(not is_out)], ordered[:, int(is_out)].tolist()
    capacity = staging.shape[2]
    staged = torch.arange(len(hosted)) % capacity
    moves = torch.stack((cached, staged) if is_out else (staged, cached), dim=1)
    moves = on_device(moves, staging.device)
    for start in range(0, len(hosted), capacity):
        move, blocks = moves[start : start + capacity], hosted[start : start + capacity]
        if is_out:
            copy_blocks(source, staging, move)
            if start + capacity >= len(hosted):
                when_done()
            for run in runs(blocks):
                _transfer(staging, run.staged, destination, run.host, run.length)
        else:
            for run in runs(blocks):
                _transfer(source, run.host, staging, run.staged, run.length)
            copy_blocks(staging, destination, move)
            if start + capacity >= len(hosted):
                when_done()


def runs(host_blocks: list[int]) -> list[Run]:
    """Runs of neighbours among blocks in ascending order, which are staged one after the other."""
    found: list[Run] = []
    for staged, host in enumerate(host_blocks):
        if found and host == found[-1].host + found[-1].length:
            found[-1] = found[-1]._replace(length=found[-1].length + 1)
        else:
            found.append(Run(staged, host, 1))
    return found


def is_block_major(store: torch.Tensor) -> bool:
    """Whether a block's keys and values, layer after layer, follow each other in memory."""
    return store.stride(1) == store[0, 0, :1].numel()


def _transfer(source: torch.Tensor, first: int, destination: torch.Tensor, place: int, count: int) -> None:
    """One piece of memory to another, both block-major."""
    blocks = source.permute(2, 0, 1, 3, 4, 5)[first : first + count]
    destination.permute(2, 0, 1, 3, 4, 5)[place : place + count].copy_(blocks, non_blocking=True)


def on_device(pairs: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Taken there through pinned memory, so that nobody waits."""
    return pairs if device.type == "cpu" else pairs.pin_memory().to(device, non_blocking=True)
