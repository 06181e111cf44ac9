"""Copies of whole cache blocks, in every layer with one launch.

    destination[layer, kv, pairs[i, 1]] = source[layer, kv, pairs[i, 0]]

    source, destination [layers, parts, num_blocks, num_kv_heads, block_size, head_size]    parts: keys and values, or
        keys alone; each block contiguous; layers and blocks at any stride: a cache has a layer's blocks side by side,
        a staging area a block's layers

A block is moved as integers of 8 bytes, whatever it holds, two by two: 16-byte accesses for every type. A program
copies a tile of one block of one layer's keys or values, four accesses a thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.variant import Variant

_TILE_BYTES = 8192
_NUM_WARPS = 4
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # bytes of one: its type


@triton.jit
def _copy_blocks_kernel(  # type: ignore[no-untyped-def]
    source,
    destination,
    pairs,
    source_layer_stride,
    source_block_stride,
    destination_layer_stride,
    destination_block_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)  # keys and values of a layer count as two
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask = word < SIZE
    source += layer * source_layer_stride + tl.load(pairs + 2 * pair) * source_block_stride
    destination += layer * destination_layer_stride + tl.load(pairs + 2 * pair + 1) * destination_block_stride
    tl.store(destination + word, tl.load(source + word, mask), mask)


def copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """See `reference.copy_blocks`; both stores and `pairs` on one device. Raises ValueError otherwise."""
    source_words, destination_words = _words(source, "source"), _words(destination, "destination")
    if source.dtype != destination.dtype or _but_blocks(source) != _but_blocks(destination):
        raise ValueError(
            f"copy_blocks: source is {source.dtype} {tuple(source.shape)}, destination {destination.dtype} "
            f"{tuple(destination.shape)}: their blocks differ"
        )
    if not source.device == destination.device == pairs.device:
        raise ValueError(
            f"copy_blocks: source is on {source.device}, destination on {destination.device}, pairs on {pairs.device}"
        )
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2 or not pairs.is_contiguous():
        raise ValueError(f"copy_blocks: pairs must be contiguous int64 [n, 2], not {pairs.dtype} {tuple(pairs.shape)}")
    if not pairs.numel():
        return
    size = source_words[0, 0, 0].numel()
    tile = _tile(size, source_words.itemsize)
    layers = source.shape[0] * source.shape[1]
    _copy_blocks_kernel[(pairs.shape[0], layers, triton.cdiv(size, tile))](
        source_words,
        destination_words,
        pairs,
        source_words.stride(1),
        source_words.stride(2),
        destination_words.stride(1),
        destination_words.stride(2),
        SIZE=size,
        TILE=tile,
        num_warps=_NUM_WARPS,
    )


def _words(store: torch.Tensor, name: str) -> torch.Tensor:
    """The same memory as the widest integers that a head's line can be cut into."""
    if store.dim() != 6 or not store[0, 0, :1].is_contiguous():
        raise ValueError(
            f"copy_blocks: {name} must be [layers, parts, num_blocks, num_kv_heads, block_size, head_size] of "
            f"contiguous blocks, not {tuple(store.shape)} with strides {store.stride()}"
        )
    if store.stride(0) != store.shape[1] * store.stride(1):
        raise ValueError(f"copy_blocks: layers of {name} must follow each other's values: strides {store.stride()}")
    line_bytes = store.shape[5] * store.itemsize
    return store.view(next(dtype for size, dtype in _WORDS.items() if line_bytes % size == 0))


def _but_blocks(store: torch.Tensor) -> tuple[int, ...]:
    return (*store.shape[:2], *store.shape[3:])


def _tile(size: int, word_bytes: int) -> int:
    """Words of a program's tile."""
    return min(_TILE_BYTES // word_bytes, triton.next_power_of_2(size))


def variants() -> Iterator[Variant]:
    """Whole tiles, a block that ends within one, one smaller than a tile, and words of 4 bytes."""
    for word_bytes, size in [(8, 4096), (8, 1280), (8, 256), (4, 640)]:
        strides = ["source_layer_stride", "source_block_stride", "destination_layer_stride", "destination_block_stride"]
        yield Variant(
            f"copy_blocks {size} words of {word_bytes} bytes",
            _copy_blocks_kernel,
            dict.fromkeys(["source", "destination"], f"*i{8 * word_bytes}")
            | {"pairs": "*i64"}
            | dict.fromkeys(strides, "i64"),
            {"SIZE": size, "TILE": _tile(size, word_bytes)},
            num_warps=_NUM_WARPS,
            divisible_by_16=("source", "destination", "pairs", *strides),
            may_spill=False,
        )
