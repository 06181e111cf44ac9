"""Queries turned, latents normed, and what new tokens leave in the cache: one launch.

    x1, x2 = first and second half, or even and odd elements;  (x1, x2) <- (x1 cos - x2 sin, x2 cos + x1 sin)
    cache[slot] = (norm(new[:latent]), turned new[latent:])

    turned, query [T, num_heads, rotary]    elements of a head adjacent, tokens and heads at any stride
    new [T, latent + rotary]                elements of a token adjacent
    cache [num_blocks, 1, block_size, latent + rotary]    a block's tokens and elements contiguous, blocks at any stride
    cos_sin f32[max positions, rotary]      a position's cosines, then its sines: every scaling is in this table

A program turns some heads of one token's query; that of the first heads writes to the cache, too. Rounded as one
operation after the other: a norm before it is weighted, a turned element once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_alike, check_contiguous
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant

_ELEMENTS_OF_A_PROGRAM = 1024  # of either half of queries: of 32 in a half, 32 heads


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _turn(place, to, cos, sin, mask, HALF: tl.constexpr, ARE_PAIRS: tl.constexpr, element):  # type: ignore[no-untyped-def]
    """Turns what lies at the halves' beginnings `place`, and writes it to `to`, half by half."""
    column = element
    if ARE_PAIRS:
        first = tl.load(place + 2 * column, mask, 0.0).to(tl.float32)
        second = tl.load(place + 2 * column + 1, mask, 0.0).to(tl.float32)
    else:
        first = tl.load(place + column, mask, 0.0).to(tl.float32)
        second = tl.load(place + HALF + column, mask, 0.0).to(tl.float32)
    kind = place.dtype.element_ty  # to which they are rounded before the cache's
    tl.store(to + column, (first * cos - second * sin).to(kind).to(to.dtype.element_ty), mask)
    tl.store(to + HALF + column, (second * cos + first * sin).to(kind).to(to.dtype.element_ty), mask)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _latent_and_cache_kernel(  # type: ignore[no-untyped-def]
    turned,
    query,
    new,
    norm,
    positions,
    cos_sin,
    cache,
    slot_mapping,
    num_heads,
    turned_stride,
    turned_head_stride,
    query_stride,
    query_head_stride,
    new_stride,
    block_stride,
    norm_eps,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    ARE_PAIRS: tl.constexpr,
):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, HALF_TILE)
    angle = cos_sin + tl.load(positions + token) * (2 * HALF) + column
    cos = tl.load(angle, column < HALF, 0.0)
    sin = tl.load(angle + HALF, column < HALF, 0.0)
    head = (tile * HEADS + tl.arange(0, HEADS))[:, None]
    mask = (head < num_heads) & (column < HALF)[None, :]
    place = query + token * query_stride + head * query_head_stride
    to = turned + token * turned_stride + head * turned_head_stride
    _turn(place, to, cos[None, :], sin[None, :], mask, HALF, ARE_PAIRS, column[None, :])
    slot = tl.load(slot_mapping + token)
    if (tile == 0) & (slot >= 0):
        line = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (LATENT + 2 * HALF)
        dims = tl.arange(0, LATENT_TILE)
        x = tl.load(new + token * new_stride + dims, dims < LATENT, 0.0).to(tl.float32)
        weight = tl.load(norm + dims, dims < LATENT, 0.0)
        y = (x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + norm_eps)).to(new.dtype.element_ty)
        product = (y.to(tl.float32) * weight.to(tl.float32)).to(new.dtype.element_ty)
        tl.store(line + dims, product.to(cache.dtype.element_ty), dims < LATENT)
        _turn(new + token * new_stride + LATENT, line + LATENT, cos, sin, column < HALF, HALF, ARE_PAIRS, column)


def latent_and_cache(
    turned: torch.Tensor,
    query: torch.Tensor,
    new: torch.Tensor,
    norm: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm_eps: float,
    are_pairs: bool,
) -> None:
    """See `kernels.oracles.reference_latent.latent_and_cache`. Raises ValueError where a shape, stride, type or device
    does not fit."""
    tensors = turned, query, new, norm, positions, cos_sin, cache, slot_mapping
    _bound(tensors, norm_eps, are_pairs)(*tensors)


@once_a_layout
def _bound(
    turned: torch.Tensor,
    query: torch.Tensor,
    new: torch.Tensor,
    norm: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_eps: float,
    are_pairs: bool,
) -> Launch:
    name, (num_tokens, num_heads, rotary_size), latent_size = "latent_and_cache", query.shape, norm.shape[0]
    if turned.shape != query.shape or turned.stride(2) != 1 or query.stride(2) != 1 or rotary_size % 2:
        strides = f"strides {turned.stride()} and {query.stride()}"
        raise ValueError(f"{name}: turned {tuple(turned.shape)} and query {tuple(query.shape)} do not fit: {strides}")
    if new.shape != (num_tokens, latent_size + rotary_size) or new.stride(1) != 1:
        raise ValueError(f"{name}: new {tuple(new.shape)} is not [{num_tokens}, {latent_size + rotary_size}]")
    if cache.dim() != 4 or cache.shape[1] != 1 or cache.shape[3] != new.shape[1]:
        raise ValueError(f"{name}: a cache of {tuple(cache.shape)} does not hold lines of {new.shape[1]}")
    if cache.stride()[2:] != (cache.shape[3], 1) or cache.device != query.device:
        raise ValueError(f"{name}: a cache on {cache.device} of strides {cache.stride()} is not contiguous in blocks")
    for which, x in (("turned", turned), ("new", new), ("norm", norm)):
        check_alike(name, which, x, query)
    for which, x in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_contiguous(name, which, x, (num_tokens,), query)
        if x.dtype != torch.int64:
            raise ValueError(f"{name}: {which} is {x.dtype}, not int64")
    check_contiguous(name, "cos_sin", cos_sin, (len(cos_sin), rotary_size), query)
    if cos_sin.dtype != torch.float32:
        raise ValueError(f"{name}: cos_sin is {cos_sin.dtype}, not float32")
    half_tile, heads = _tile(rotary_size, num_heads)
    return Launch(
        _latent_and_cache_kernel,
        (num_tokens, cdiv(num_heads, heads)),
        (num_heads, *turned.stride()[:2], *query.stride()[:2], new.stride(0), cache.stride(0), norm_eps),
        BLOCK_SIZE=cache.shape[2],
        LATENT=latent_size,
        LATENT_TILE=next_power_of_2(latent_size),
        HALF=rotary_size // 2,
        HALF_TILE=half_tile,
        HEADS=heads,
        ARE_PAIRS=are_pairs,
    )


def _tile(rotary_size: int, num_heads: int) -> tuple[int, int]:
    """(elements of a half, heads) of a program's tile, both padded to powers of 2."""
    half = next_power_of_2(rotary_size // 2)
    return half, min(max(_ELEMENTS_OF_A_PROGRAM // half, 1), next_power_of_2(num_heads))


def variants() -> Iterator[Variant]:
    """Of all published models, in pairs and in halves, and one whose sizes are no powers of 2."""
    cases = [("bf16", 128, 512, 64, True), ("fp16", 16, 512, 64, True), ("fp32", 16, 512, 64, False)]
    for dtype, num_heads, latent_size, rotary_size, are_pairs in [*cases, ("bf16", 6, 320, 48, True)]:
        half_tile, heads = _tile(rotary_size, num_heads)
        tensors = ["turned", "query", "new", "norm", "cache"]
        strides = ["turned_stride", "turned_head_stride", "query_stride", "query_head_stride", "new_stride"]
        strides.append("block_stride")
        yield Variant(
            f"latent_and_cache {dtype} {num_heads} heads latent {latent_size} turned {rotary_size}",
            _latent_and_cache_kernel,
            dict.fromkeys(tensors, f"*{dtype}")
            | {"positions": "*i64", "cos_sin": "*fp32", "slot_mapping": "*i64", "num_heads": "i32", "norm_eps": "fp32"}
            | dict.fromkeys(strides, "i32"),
            {
                "BLOCK_SIZE": 16,
                "LATENT": latent_size,
                "LATENT_TILE": next_power_of_2(latent_size),
                "HALF": rotary_size // 2,
                "HALF_TILE": half_tile,
                "HEADS": heads,
                "ARE_PAIRS": are_pairs,
            },
            divisible_by_16=(*tensors, "cos_sin", "slot_mapping", "positions", *strides),
            may_spill=False,
        )
