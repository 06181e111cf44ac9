"""New keys and values to their slots in the paged cache; see `kernels.oracles.reference.reshape_and_cache`.

    cache[slot // block_size, head, slot % block_size] = x[token, head]       / scale[head] and cut to the largest
                                                                              number there is, in a cache of 8 bits
    key, value [T, num_kv_heads, head_size]     a token's heads contiguous, any stride between tokens: part of a product
    key_cache, value_cache [num_blocks, num_kv_heads, block_size, head_size], blocks of any stride; slot_mapping i64[T]

A program moves all heads of one token, keys or values: it reads one line and writes as many lines of head_size as there
are heads, 16 bytes a thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.variant import CAPABILITIES, Variant

_LARGEST_FP8 = tl.constexpr(448.0)  # of e4m3 without infinities: beyond it a plain conversion gives NaN
_ELEMENTS_OF_A_THREAD = 8
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _reshape_and_cache_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    key_stride,
    value_stride,
    block_stride,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LINE: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        element = tl.arange(0, LINE)
        mask = element < HEADS * HEAD_SIZE
        head = element // HEAD_SIZE
        place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD_SIZE
        places = place + head * (BLOCK_SIZE * HEAD_SIZE) + element % HEAD_SIZE
        if tl.program_id(1) == 0:
            x = tl.load(key + token * key_stride + element, mask)
            if IS_FP8:
                x = _cut(x, key_scale, head, mask)
            tl.store(key_cache + places, x.to(key_cache.dtype.element_ty), mask)
        else:
            x = tl.load(value + token * value_stride + element, mask)
            if IS_FP8:
                x = _cut(x, value_scale, head, mask)
            tl.store(value_cache + places, x.to(value_cache.dtype.element_ty), mask)


@triton.jit
def _cut(x, scale, head, mask):  # type: ignore[no-untyped-def]
    """Divided by its head's scale where there is one, and no larger than 8 bits can tell; NaN stays NaN."""
    x = x.to(tl.float32)
    if scale is not None:
        x = tl.div_rn(x, tl.load(scale + head, mask, 1.0))  # as everywhere: `/` rounds otherwise on a GPU
    return tl.clamp(x, -_LARGEST_FP8, _LARGEST_FP8, propagate_nan=tl.PropagateNan.ALL)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """See `kernels.oracles.reference.reshape_and_cache`. Caches in float32, float16, bfloat16 or float8_e4m3fn.

    Raises ValueError where a shape, stride, type or device does not fit.
    """
    tensors = key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale
    _bound(tensors)(*tensors)


@once_a_layout
def _bound(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> Launch:
    num_tokens, num_heads, head_size = key.shape
    check_caches(key, value, key_cache, value_cache)
    check_contiguous("reshape_and_cache", "slot_mapping", slot_mapping, (num_tokens,), key)
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            check_contiguous("reshape_and_cache", name, scale, (num_heads,), key)
            if not is_fp8 or scale.dtype != torch.float32:
                raise ValueError(f"reshape_and_cache: {name} of {scale.dtype} for a cache of {key_cache.dtype}")
    line = triton.next_power_of_2(num_heads * head_size)
    return Launch(
        _reshape_and_cache_kernel,
        (num_tokens, 2),
        (key.stride(0), value.stride(0), key_cache.stride(0)),
        HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=key_cache.shape[2],
        LINE=line,
        IS_FP8=is_fp8,
        num_warps=_num_warps(line),
    )


def check_caches(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raises ValueError where keys, values and the caches that they go to do not fit each other."""
    _, num_heads, head_size = key.shape
    block_size = key_cache.shape[2]
    for name, x in (("key", key), ("value", value)):
        if x.shape != key.shape or x.dtype not in _TYPES or x.dtype != key.dtype or x.device != key.device:
            raise ValueError(
                f"reshape_and_cache: {name} {tuple(x.shape)} {x.dtype} does not fit key {tuple(key.shape)}"
            )
        if x.stride()[1:] != (head_size, 1):
            raise ValueError(f"reshape_and_cache: a token's heads are not contiguous in {name}: strides {x.stride()}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.shape != key_cache.shape or cache.stride() != key_cache.stride() or cache.dtype != key_cache.dtype:
            raise ValueError("reshape_and_cache: key_cache and value_cache differ in shape, strides or type")
        if cache.shape[1::2] != (num_heads, head_size) or cache.device != key.device:
            raise ValueError(f"reshape_and_cache: key {tuple(key.shape)} does not fit {name} {tuple(cache.shape)}")
        if cache.stride()[1:] != (block_size * head_size, head_size, 1):
            raise ValueError(f"reshape_and_cache: a block of {name} is not contiguous: strides {cache.stride()}")
        if cache.dtype not in (*_TYPES, torch.float8_e4m3fn):
            raise ValueError(f"reshape_and_cache: no caches of {cache.dtype}")


def _num_warps(line: int) -> int:
    return min(max(line // (32 * _ELEMENTS_OF_A_THREAD), 1), 16)


def variants() -> Iterator[Variant]:
    """Types of model and cache, and the head sizes and block sizes where a line is cut differently."""
    kinds = [("bf16", "bf16", 8, 128, 16), ("fp16", "fp16", 8, 64, 32), ("fp32", "fp32", 2, 80, 8)]
    kinds += [("bf16", "fp8e4nv", 8, 128, 16), ("bf16", "bf16", 32, 96, 256), ("fp16", "bf16", 1, 256, 16)]
    for dtype, cache, num_heads, head_size, block_size in kinds:
        for is_scaled in (False, True)[: 2 if cache == "fp8e4nv" else 1]:
            signature = {"key": f"*{dtype}", "value": f"*{dtype}", "key_cache": f"*{cache}", "value_cache": f"*{cache}"}
            signature |= {"slot_mapping": "*i64", "key_stride": "i32", "value_stride": "i32", "block_stride": "i32"}
            constants: dict[str, Any] = {"HEADS": num_heads, "HEAD_SIZE": head_size, "BLOCK_SIZE": block_size}
            for name in ("key_scale", "value_scale"):
                if is_scaled:
                    signature[name] = "*fp32"
                else:
                    constants[name] = None
            line = triton.next_power_of_2(num_heads * head_size)
            yield Variant(
                f"reshape_and_cache {dtype} to {cache}{' scaled' * is_scaled} {num_heads} x {head_size} "
                f"block {block_size}",
                _reshape_and_cache_kernel,
                signature,
                constants | {"LINE": line, "IS_FP8": cache == "fp8e4nv"},
                num_warps=_num_warps(line),
                divisible_by_16=tuple(signature),
                capabilities=range(89, 130) if cache == "fp8e4nv" else CAPABILITIES,
                may_spill=False,
            )
