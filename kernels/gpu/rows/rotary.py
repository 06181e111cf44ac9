"""Rotary position embedding in place (Su et al. 2021, arXiv:2104.09864).

    x1, x2 = first and second half of a head's turned elements;  (x1, x2) <- (x1 cos - x2 sin, x2 cos + x1 sin)

    query [T, num_heads, head_size], key [T, num_kv_heads, head_size]    heads and tokens at any stride
    cos_sin f32[max positions, rotary_size]    a position's cosines, then its sines: every scaling is in this table

A program turns a few heads of one token, of its query or of its key, and reads the angles once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_alike, check_contiguous
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant

_ELEMENTS_OF_A_PROGRAM = 2048  # of either half: 16 a thread, two 16-byte accesses of two bytes each, in four warps


@triton.jit
def _rotary_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    positions,
    cos_sin,
    num_heads,
    num_kv_heads,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(num_heads, HEADS)
    is_query = tile < query_tiles
    heads = tl.where(is_query, num_heads, num_kv_heads)
    head_stride = tl.where(is_query, query_head_stride, key_head_stride)
    if is_query:
        line = query + token * query_stride
    else:
        line = key + token * key_stride
        tile -= query_tiles
    head = tile * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (column < HALF)
    angle = cos_sin + tl.load(positions + token) * (2 * HALF) + column
    place = line + head * head_stride + column
    first = tl.load(place, mask, 0.0).to(tl.float32)
    second = tl.load(place + HALF, mask, 0.0).to(tl.float32)
    cos = tl.load(angle, column < HALF, 0.0)
    sin = tl.load(angle + HALF, column < HALF, 0.0)
    tl.store(place, (first * cos - second * sin).to(query.dtype.element_ty), mask)
    tl.store(place + HALF, (second * cos + first * sin).to(query.dtype.element_ty), mask)


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """See `reference.rotary`; elements of a head adjacent, positions i64. Raises ValueError otherwise."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, rotary_size = key.shape[1], cos_sin.shape[1]
    if key.shape != (num_tokens, num_kv_heads, head_size) or query.stride(2) != 1 or key.stride(2) != 1:
        raise ValueError(
            f"rotary: query and key must be [T, heads, head_size] with adjacent elements, not {tuple(query.shape)} and "
            f"{tuple(key.shape)} with strides {query.stride()} and {key.stride()}"
        )
    check_alike("rotary", "key", key, query)
    check_contiguous("rotary", "positions", positions, (num_tokens,), query)
    check_contiguous("rotary", "cos_sin", cos_sin, tuple(cos_sin.shape), query)
    if positions.dtype != torch.int64 or cos_sin.dtype != torch.float32:
        raise ValueError(f"rotary: positions must be int64 and cos_sin float32, not {positions.dtype}, {cos_sin.dtype}")
    if rotary_size % 2 or not 0 < rotary_size <= head_size:
        raise ValueError(f"rotary: {rotary_size} of a head's {head_size} elements cannot be turned in halves")
    if not num_tokens:
        return
    block, heads = _tile(rotary_size, num_heads)
    _rotary_kernel[(num_tokens, cdiv(num_heads, heads) + cdiv(num_kv_heads, heads))](
        query,
        key,
        positions,
        cos_sin,
        num_heads,
        num_kv_heads,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        HALF=rotary_size // 2,
        BLOCK=block,
        HEADS=heads,
        num_warps=_num_warps(block, heads),
    )


def _tile(rotary_size: int, num_heads: int) -> tuple[int, int]:
    """(elements of a half, heads) of a program's tile, both padded to powers of 2."""
    block = next_power_of_2(rotary_size // 2)
    return block, min(max(_ELEMENTS_OF_A_PROGRAM // block, 1), next_power_of_2(num_heads))


def _num_warps(block: int, heads: int) -> int:
    return max(block * heads // (_ELEMENTS_OF_A_PROGRAM // 4), 1)


def variants() -> Iterator[Variant]:
    """Whole heads and parts of them, sizes that are powers of 2 and such that are not."""
    cases = [("bf16", head_size, head_size, 32, 8) for head_size in (32, 64, 80, 96, 128, 256)]
    cases += [("bf16", 80, 32, 32, 8), ("bf16", 128, 128, 9, 1), ("fp16", 128, 128, 32, 8), ("fp32", 128, 128, 32, 8)]
    for dtype, head_size, rotary_size, num_heads, num_kv_heads in cases:
        block, heads = _tile(rotary_size, num_heads)
        tensors, strides = ["query", "key"], ["query_stride", "query_head_stride", "key_stride", "key_head_stride"]
        constants = {"HALF": rotary_size // 2, "BLOCK": block, "HEADS": heads}
        counts = ["num_heads", "num_kv_heads"]
        if num_kv_heads == 1:
            constants[counts.pop()] = 1  # as the launcher's arguments are specialised
        yield Variant(
            f"rotary {dtype} head {head_size} turned {rotary_size} heads {num_heads}, {num_kv_heads}",
            _rotary_kernel,
            dict.fromkeys(tensors, f"*{dtype}")
            | {"positions": "*i64", "cos_sin": "*fp32"}
            | dict.fromkeys([*counts, *strides], "i32"),
            constants,
            num_warps=_num_warps(block, heads),
            divisible_by_16=(*tensors, "positions", "cos_sin", *strides),
            may_spill=False,
        )
