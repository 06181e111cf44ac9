"""What is done to each row alone: norms, activations, rotation, and its way into the cache. The code: native/rows.cpp.

Signatures and formulas are those of `kernels.oracles.reference`. A row's result depends on nothing else.
"""

from __future__ import annotations

import struct

import torch

from kernels.cpu.elements import check_cache, check_heads, check_integers, element_of, stored_element_of
from kernels.cpu.library import library, num_threads

_CACHE = struct.Struct("=7q")  # `Cache` of native/rows.h


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> None:
    """See `kernels.oracles.reference.rms_norm`; all contiguous."""
    for rows in (out, x) if residual is None else (out, x, residual):
        if rows.shape != x.shape or not rows.is_contiguous():
            raise ValueError(
                f"rows {tuple(rows.shape)} of a norm of {tuple(x.shape)} are not as many, or not contiguous"
            )
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"weight {tuple(weight.shape)} is not for rows {tuple(x.shape)}")
    element = element_of(out, x, weight) if residual is None else element_of(out, x, weight, residual)
    addresses = out.data_ptr(), x.data_ptr(), weight.data_ptr(), 0 if residual is None else residual.data_ptr()
    library().rms_norm(element, *addresses, *x.shape, eps, weight_offset, num_threads())


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """See `kernels.oracles.reference.silu_and_mul`; both contiguous."""
    _check_halves(out, x)
    library().silu_and_mul(element_of(out, x), out.data_ptr(), x.data_ptr(), *out.shape, num_threads())


def clamped_swiglu(out: torch.Tensor, x: torch.Tensor, *, alpha: float, limit: float) -> None:
    """See `kernels.oracles.reference.clamped_swiglu`; both contiguous."""
    _check_halves(out, x)
    places = out.data_ptr(), x.data_ptr(), *out.shape
    library().clamped_swiglu(element_of(out, x), *places, alpha, limit, num_threads())


def _check_halves(out: torch.Tensor, x: torch.Tensor) -> None:
    if x.shape != (out.shape[0], 2 * out.shape[1]) or not (out.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"x {tuple(x.shape)} is not a gate and its values for out {tuple(out.shape)}, both contiguous")


def gelu(out: torch.Tensor, x: torch.Tensor, *, is_approximate: bool) -> None:
    """See `kernels.oracles.reference.gelu`; both contiguous."""
    if x.shape != out.shape or not (out.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"x {tuple(x.shape)} is not for out {tuple(out.shape)}, both contiguous")
    _gelu(out, x, False, is_approximate)


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor, *, is_approximate: bool) -> None:
    """See `kernels.oracles.reference.gelu_and_mul`; both contiguous."""
    _check_halves(out, x)
    _gelu(out, x, True, is_approximate)


def _gelu(out: torch.Tensor, x: torch.Tensor, is_gated: bool, is_approximate: bool) -> None:
    places = out.data_ptr(), x.data_ptr(), *out.shape
    library().gelu(element_of(out, x), *places, is_gated, is_approximate, num_threads())


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """See `reference.rotary`; `cos_sin` is float32; query and key may be strided in their first dimension. Raises
    IndexError for a position without angles."""
    rows, num_heads, head_size = query.shape
    check_heads(query=query, key=key)
    if key.shape[::2] != (rows, head_size) or len(positions) != rows:
        raise ValueError(f"key {tuple(key.shape)} or {len(positions)} positions do not fit query {tuple(query.shape)}")
    check_angles(cos_sin, head_size)
    check_integers(torch.int64, positions=positions)
    check_positions(positions, cos_sin.shape[0])
    library().rotary(
        element_of(query, key),
        query.data_ptr(),
        query.stride(0),
        num_heads,
        key.data_ptr(),
        key.stride(0),
        key.shape[1],
        head_size,
        rows,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        num_threads(),
    )


def check_positions(positions: torch.Tensor, num_angles: int) -> None:
    """Raises IndexError for a position beyond a table of so many: compiled code would read what lies there."""
    if library().position_without_angles(positions.data_ptr(), positions.shape[0], num_angles) >= 0:
        raise IndexError("a position is not within those that have angles")


def check_angles(cos_sin: torch.Tensor, head_size: int) -> None:
    """Raises ValueError for a table that is not float32[positions, elements that are turned], contiguous."""
    is_table = cos_sin.dtype == torch.float32 and cos_sin.dim() == 2 and cos_sin.is_contiguous()
    if not is_table or cos_sin.shape[1] > head_size or cos_sin.shape[1] % 2:
        raise ValueError(f"cos_sin {tuple(cos_sin.shape)} of {cos_sin.dtype} turns no heads of {head_size}")


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference.reshape_and_cache`; key and value may be strided in their first dimension."""
    check_integers(torch.int64, slot_mapping=slot_mapping)
    check_heads(key=key, value=value)
    check_cache(key_cache, value_cache)
    for name, rows in (("key", key), ("value", value)):
        if rows.shape[1:] != key_cache.shape[1::2] or len(rows) < len(slot_mapping):
            raise ValueError(f"{name} {tuple(rows.shape)} does not fit a cache of {tuple(key_cache.shape)}")
    stored = stored_element_of(key_cache, value_cache)
    cache = _CACHE.pack(key_cache.data_ptr(), value_cache.data_ptr(), stored, *key_cache.shape)
    places = key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)
    library().reshape_and_cache(element_of(key, value), *places, cache, slot_mapping.data_ptr(), slot_mapping.shape[0])


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
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    norm_weight_offset: float = 0.0,
) -> None:
    """See `kernels.oracles.reference.rotary_and_cache`; one after the other."""
    for heads, weight in ((query, query_norm), (key, key_norm)):
        if weight is not None:
            rows = heads.reshape(-1, heads.shape[-1]).contiguous()  # a copy, where they are part of a fused product
            rms_norm(rows, rows, weight, eps=norm_eps, weight_offset=norm_weight_offset)
            heads.copy_(rows.view(heads.shape))
    rotary(query, key, positions, cos_sin)
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
