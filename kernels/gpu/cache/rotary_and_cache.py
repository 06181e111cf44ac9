"""Queries and keys rotated by their positions, keys and values written to the paged cache: one launch before attention.

    cache[slot // block_size, head, slot % block_size] = turned(x[token, head]) / scale[head]
    x = rms_norm(x, query_norm or key_norm) before that, where a model norms each head

    key, value [T, num_kv_heads, head_size], query [T, num_heads, head_size]    a token's heads contiguous, tokens apart
    key_cache, value_cache [num_blocks, num_kv_heads, block_size, head_size]    a block contiguous, blocks at any stride
    cos_sin f32[max positions, rotary_size], slot_mapping and positions i64[T]  as in `kernels.gpu.rows.rotary`
    query_norm, key_norm [head_size]                                            weights of the norms, in the heads' type

Source: Su et al. 2021 (arXiv:2104.09864) for the rotation, Kwon et al. 2023 (arXiv:2309.06180) for slots. Programs of a
token write some heads each, keys and values; others turn its query in place. Rotated keys are neither written back nor
read again, which saves a third of what `rotary` and `reshape_and_cache` move for keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.cache.reshape_and_cache import check_caches
from kernels.gpu.checks import check_alike, check_contiguous
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import CAPABILITIES, Variant

_ELEMENTS = 1024  # of keys, and as many of values, that a program writes
_MAX_E4M3 = tl.constexpr(448.0)


@triton.jit
def _stored(x, scale, heads, mask, cache):  # type: ignore[no-untyped-def]
    """x [heads, elements] as the cache holds it."""
    if scale is not None:
        x = tl.div_rn(x.to(tl.float32), tl.load(scale + heads, mask, 1.0) + tl.zeros(x.shape, tl.float32))
    if cache.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -_MAX_E4M3, _MAX_E4M3, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache.dtype.element_ty)


@triton.jit
def _inverse_rms(x, eps, HEAD_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What norms each head of x [heads, elements], [heads, 1]: whole heads, of squares that are rounded before they are
    added, as `rms_norm` rounds those of rows. Threads share a head out as they do a row where its elements are as
    many."""
    y = x.to(tl.float32)
    return tl.rsqrt(tl.sum(tl.fma(y, y, tl.zeros_like(y)), axis=1) / HEAD_SIZE + eps)[:, None]


@triton.jit
def _normed(x, inverse, norm, norm_offset, columns, mask, HAS_NORM_OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """`columns` x [heads, elements] of heads, normed and weighted, rounded as `rms_norm` rounds; without norm: x."""
    if norm is not None:
        y, weight = x.to(tl.float32) * inverse, tl.load(norm + columns, mask, 0.0).to(tl.float32)
        if HAS_NORM_OFFSET:
            y *= weight + norm_offset
        else:
            y = y.to(x.dtype).to(tl.float32) * weight
        x = y.to(x.dtype)
    return x


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    line,
    angles,
    heads,
    inside,
    inverse,
    norm,
    norm_offset,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HAS_NORM_OFFSET: tl.constexpr,
):
    """Both halves [heads, HALF_TILE] of what is turned of each head, in the heads' own type."""
    columns = tl.arange(0, HALF_TILE)[None, :]
    mask = inside & (columns < HALF)
    first = tl.load(line + heads * HEAD_SIZE + columns, mask, 0.0)
    second = tl.load(line + heads * HEAD_SIZE + HALF + columns, mask, 0.0)
    first = _normed(first, inverse, norm, norm_offset, columns, columns < HALF, HAS_NORM_OFFSET)
    second = _normed(second, inverse, norm, norm_offset, columns + HALF, columns < HALF, HAS_NORM_OFFSET)
    cos = tl.load(angles + columns, columns < HALF, 0.0)
    sin = tl.load(angles + HALF + columns, columns < HALF, 0.0)
    turned_first = first.to(tl.float32) * cos - second.to(tl.float32) * sin
    turned_second = second.to(tl.float32) * cos + first.to(tl.float32) * sin
    return turned_first.to(first.dtype), turned_second.to(first.dtype)


@triton.jit(do_not_specialize=["slot_mapping", "positions"])
def _rotary_and_cache_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    positions,
    cos_sin,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    query_norm,
    key_norm,
    norm_eps,
    norm_offset,
    num_heads,
    num_kv_heads,
    query_stride,
    key_stride,
    value_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HAS_NORM_OFFSET: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles = tl.cdiv(num_kv_heads, HEADS)
    columns, halves = tl.arange(0, HEAD_TILE)[None, :], tl.arange(0, HALF_TILE)[None, :]
    angles = cos_sin + tl.load(positions + token) * (2 * HALF)
    if tile < tiles:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            heads = tile * HEADS + tl.arange(0, HEADS)[:, None]
            inside = heads < num_kv_heads
            mask = inside & (columns < HEAD_SIZE)
            lines = slot // BLOCK_SIZE * block_stride + (heads * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_SIZE
            x = tl.load(value + token * value_stride + heads * HEAD_SIZE + columns, mask, 0.0)
            tl.store(value_cache + lines + columns, _stored(x, value_scale, heads, inside, value_cache), mask)
            line, inverse = key + token * key_stride, 1.0
            if key_norm is not None or 2 * HALF < HEAD_SIZE:
                x = tl.load(line + heads * HEAD_SIZE + columns, mask, 0.0)
            if key_norm is not None:
                inverse = _inverse_rms(x, norm_eps, HEAD_SIZE)
            of_norm = (inverse, key_norm, norm_offset)
            first, second = _turn(line, angles, heads, inside, *of_norm, HALF, HALF_TILE, HEAD_SIZE, HAS_NORM_OFFSET)
            place = key_cache + lines + halves
            turned = inside & (halves < HALF)
            tl.store(place, _stored(first, key_scale, heads, inside, key_cache), turned)
            tl.store(place + HALF, _stored(second, key_scale, heads, inside, key_cache), turned)
            if 2 * HALF < HEAD_SIZE:
                x = _normed(x, *of_norm, columns, columns < HEAD_SIZE, HAS_NORM_OFFSET)
                mask = mask & (columns >= 2 * HALF)
                tl.store(key_cache + lines + columns, _stored(x, key_scale, heads, inside, key_cache), mask)
    else:
        heads = (tile - tiles) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = heads < num_heads
        line, inverse = query + token * query_stride, 1.0
        if query_norm is not None:
            mask = inside & (columns < HEAD_SIZE)
            x = tl.load(line + heads * HEAD_SIZE + columns, mask, 0.0)
            inverse = _inverse_rms(x, norm_eps, HEAD_SIZE)
        of_norm = (inverse, query_norm, norm_offset)
        first, second = _turn(line, angles, heads, inside, *of_norm, HALF, HALF_TILE, HEAD_SIZE, HAS_NORM_OFFSET)
        turned = inside & (halves < HALF)
        tl.store(line + heads * HEAD_SIZE + halves, first, turned)
        tl.store(line + heads * HEAD_SIZE + HALF + halves, second, turned)
        if query_norm is not None and 2 * HALF < HEAD_SIZE:
            x = _normed(x, *of_norm, columns, columns < HEAD_SIZE, HAS_NORM_OFFSET)
            tl.store(line + heads * HEAD_SIZE + columns, x, mask & (columns >= 2 * HALF))


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    norm_weight_offset: float = 0.0,
) -> None:
    """See `reference.rotary_and_cache`. Raises ValueError where a shape, stride or type does not fit."""
    scales_and_norms = key_scale, value_scale, query_norm, key_norm
    tensors = query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping, *scales_and_norms
    _bound(tensors, norm_eps, norm_weight_offset)(*tensors)


@once_a_layout
def _bound(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    norm_eps: float,
    norm_weight_offset: float,
) -> Launch:
    name, (num_tokens, num_kv_heads, head_size), rotary_size = "rotary_and_cache", key.shape, cos_sin.shape[1]
    check_caches(key, value, key_cache, value_cache)
    if query.shape[::2] != (num_tokens, head_size) or query.stride()[1:] != (head_size, 1):
        raise ValueError(f"{name}: query {tuple(query.shape)}, {query.stride()} does not fit key {tuple(key.shape)}")
    check_alike(name, "query", query, key)
    check_contiguous(name, "positions", positions, (num_tokens,), key)
    check_contiguous(name, "slot_mapping", slot_mapping, (num_tokens,), key)
    check_contiguous(name, "cos_sin", cos_sin, tuple(cos_sin.shape), key)
    for which, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            check_contiguous(name, which, scale, (num_kv_heads,), key)
    for which, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            check_contiguous(name, which, norm, (head_size,), key)
            check_alike(name, which, norm, key)
    if (query_norm is None) != (key_norm is None):
        raise ValueError(f"{name}: both heads of queries and of keys are normed, or neither")
    if rotary_size % 2 or not 0 < rotary_size <= head_size:
        raise ValueError(f"{name}: {rotary_size} of a head's {head_size} elements cannot be turned in halves")
    num_heads, heads = query.shape[1], _heads(num_kv_heads, head_size)
    strides = query.stride(0), key.stride(0), value.stride(0), key_cache.stride(0)
    return Launch(
        _rotary_and_cache_kernel,
        (num_tokens, cdiv(num_kv_heads, heads) + cdiv(num_heads, heads)),
        (norm_eps, norm_weight_offset, num_heads, num_kv_heads, *strides),
        **_shape(key_cache.shape[2], head_size, heads, rotary_size // 2),
        HAS_NORM_OFFSET=norm_weight_offset != 0.0,
        num_warps=_num_warps(heads, head_size),
    )


def _shape(block_size: int, head_size: int, heads: int, half: int) -> dict[str, int]:
    tiles = {"HEAD_TILE": next_power_of_2(head_size), "HALF_TILE": next_power_of_2(half)}
    return {"BLOCK_SIZE": block_size, "HEAD_SIZE": head_size, "HEADS": heads, "HALF": half, **tiles}


def _heads(num_kv_heads: int, head_size: int) -> int:
    """Heads of a program's tile."""
    return min(max(_ELEMENTS // next_power_of_2(head_size), 1), next_power_of_2(num_kv_heads))


def _num_warps(heads: int, head_size: int) -> int:
    """16 elements of keys a thread: 16 bytes of either half, in 16 bits."""
    return max(heads * next_power_of_2(head_size) // (32 * 16), 1)


def variants() -> Iterator[Variant]:
    """Types of caches, whole heads and parts of them, norms as Qwen 3 and Gemma 3 have them."""
    for dtype, cache, head_size, half, block_size, norm in (
        ("bf16", "bf16", 128, 64, 16, ""),
        ("bf16", "fp8e4nv", 128, 64, 16, ""),
        ("fp16", "fp16", 80, 40, 16, ""),
        ("bf16", "bf16", 80, 16, 8, ""),
        ("bf16", "fp16", 96, 48, 256, ""),
        ("fp32", "fp32", 64, 32, 16, ""),
        ("bf16", "bf16", 128, 64, 16, "normed"),
        ("bf16", "fp8e4nv", 128, 64, 16, "normed"),
        ("bf16", "bf16", 256, 128, 16, "normed with offset"),
        ("bf16", "bf16", 80, 16, 8, "normed"),
        ("fp32", "fp32", 128, 64, 16, "normed"),
    ):
        yield _variant(dtype, cache, head_size, half, block_size, norm)


def _variant(dtype: str, cache: str, head_size: int, half: int, block_size: int, norm: str) -> Variant:
    of_type, is_fp8 = dict.fromkeys(("query", "key", "value"), f"*{dtype}"), cache == "fp8e4nv"
    signature = {**of_type, "key_cache": f"*{cache}", "value_cache": f"*{cache}", "cos_sin": "*fp32"}
    aligned = [*signature, *(f"{name}_stride" for name in ("query", "key", "value", "block"))]
    signature |= {"slot_mapping": "*i64", "positions": "*i64", "num_heads": "i32", "num_kv_heads": "i32"}
    signature |= {name: "i32" for name in aligned if name.endswith("_stride")}
    signature |= dict.fromkeys(("norm_eps", "norm_offset"), "fp32")
    heads, scales, norms = _heads(8, head_size), ("key_scale", "value_scale"), ("query_norm", "key_norm")
    constants: dict[str, Any] = dict(_shape(block_size, head_size, heads, half))
    constants["HAS_NORM_OFFSET"] = "offset" in norm
    for names, kind in ((scales, "*fp32" if is_fp8 else ""), (norms, f"*{dtype}" if norm else "")):
        if kind:
            signature |= dict.fromkeys(names, kind)
        else:
            constants |= dict.fromkeys(names)
    if norm:
        aligned += norms
    return Variant(
        f"rotary_and_cache {dtype} cache {cache} head {head_size} turned {2 * half} block {block_size} {norm}".rstrip(),
        _rotary_and_cache_kernel,
        signature,
        constants,
        num_warps=_num_warps(heads, head_size),
        divisible_by_16=tuple(aligned),
        may_spill=False,
        capabilities=range(89, 130) if is_fp8 else CAPABILITIES,
    )
