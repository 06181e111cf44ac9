"""Writing new keys and values to their slots, rotated or not, and copying blocks: bound by memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.bench.case import Calls, Case, Goal, Setting
from kernels.bench.shapes import BLOCK_SIZE, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS
from kernels.gpu.operations import copy_blocks, reshape_and_cache, rotary_and_cache

_TOKENS = (256, 4096, 16384)
_PAIRS = (16, 128)
_GOAL_TOKENS = 4096  # from here on a launch no longer counts
_GOAL = 0.8
_POSITIONS = 8192


def cases(setting: Setting) -> Iterator[Case]:
    """By number of tokens, and of block pairs copied."""
    for num_tokens in (5,) if setting.is_tiny else _TOKENS:
        yield _reshape_and_cache(setting, num_tokens)
    for num_tokens in (5,) if setting.is_tiny else _TOKENS:
        yield _rotary_and_cache(setting, num_tokens)
    for num_pairs in (3,) if setting.is_tiny else _PAIRS:
        yield _copy_blocks(setting, 2 if setting.is_tiny else NUM_LAYERS, num_pairs)


def _reshape_and_cache(setting: Setting, num_tokens: int) -> Case:
    def build() -> Calls:
        device, dtype = setting.device, setting.dtype
        num_blocks = 2 * -(-num_tokens // BLOCK_SIZE)
        caches = torch.zeros(2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype=dtype, device=device)
        key, value = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_SIZE, dtype=dtype, device=device)
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
        blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

        def ours() -> torch.Tensor:
            reshape_and_cache(key, value, caches[0], caches[1], slots)
            return caches

        def indexing() -> torch.Tensor:
            caches[0][blocks, :, offsets] = key
            caches[1][blocks, :, offsets] = value
            return caches

        return Calls(ours, {"indexing": indexing})

    row_bytes = NUM_KV_HEADS * HEAD_SIZE * setting.dtype.itemsize
    return Case(
        op="reshape_and_cache",
        shape=f"{num_tokens:,} tokens",
        num_bytes=num_tokens * (2 * 2 * row_bytes + 8),
        build=build,
        goal=Goal(_GOAL) if num_tokens >= _GOAL_TOKENS else None,
    )


def _rotary_and_cache(setting: Setting, num_tokens: int) -> Case:
    def build() -> Calls:
        device, dtype = setting.device, setting.dtype
        num_blocks = 2 * -(-num_tokens // BLOCK_SIZE)
        caches = torch.zeros(2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype=dtype, device=device)
        heads = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE, dtype=dtype, device=device)
        query, key, value = heads.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)  # parts of one product
        angles = torch.rand(_POSITIONS, HEAD_SIZE // 2, device=device)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        positions = torch.randint(_POSITIONS, (num_tokens,), device=device)
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
        blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

        def ours() -> None:  # queries are turned in place, further with each call: nothing to compare
            rotary_and_cache(query, key, value, positions, cos_sin, caches[0], caches[1], slots)

        def plain() -> None:
            cos, sin = (part[:, None, :] for part in cos_sin[positions].to(dtype).chunk(2, dim=-1))
            turned = heads[:, : NUM_HEADS + NUM_KV_HEADS]
            x1, x2 = turned.chunk(2, dim=-1)
            turned.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))
            caches[0][blocks, :, offsets] = key
            caches[1][blocks, :, offsets] = value

        return Calls(ours, {"cat of halves, indexing": plain})

    row_bytes = (2 * NUM_HEADS + 4 * NUM_KV_HEADS) * HEAD_SIZE * setting.dtype.itemsize
    return Case(
        op="rotary_and_cache",
        shape=f"{num_tokens:,} tokens",
        num_bytes=num_tokens * (row_bytes + 8 + 8 + 4 * HEAD_SIZE),  # a slot, a position and its angles, too
        build=build,
        goal=Goal(_GOAL) if num_tokens >= _GOAL_TOKENS else None,
    )


def _copy_blocks(setting: Setting, num_layers: int, num_pairs: int) -> Case:
    shape = (num_layers, 2, 2 * num_pairs, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    block_bytes = num_layers * 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_SIZE * setting.dtype.itemsize

    def build() -> Calls:
        store = torch.randn(shape, dtype=setting.dtype, device=setting.device)
        pairs = torch.randperm(2 * num_pairs, device=setting.device).view(num_pairs, 2)
        sources, destinations = pairs.T.contiguous()

        def ours() -> torch.Tensor:
            copy_blocks(store, store, pairs)
            return store

        def indexing() -> torch.Tensor:
            return store.index_copy_(2, destinations, store.index_select(2, sources))

        return Calls(ours, {"indexing": indexing})

    return Case(
        op="copy_blocks",
        shape=f"{num_pairs} blocks in {num_layers} layers",
        num_bytes=num_pairs * 2 * block_bytes,
        build=build,
        goal=Goal(_GOAL) if num_pairs * BLOCK_SIZE >= _GOAL_TOKENS / 16 else None,
    )
