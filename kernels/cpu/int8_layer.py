"""What comes before and after attention in a Llama-like layer with weights of eight bits, a call each.

    before:  residual += update;  q, k, v = W_qkv norm(residual);  q, k turned by position;  k, v -> cache
    after:   residual += W_out attended;  update = W_down (silu(gate) * up),  gate, up = W_inner norm(residual)

The kernels are those of `rms_norm`, `int8_linear`, `rotary`, `reshape_and_cache` and `silu_and_mul`, bit for bit; what
is saved is the way from Python to each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit

from kernels.cpu.activation import _silu_and_mul
from kernels.cpu.cache import _reshape_and_cache
from kernels.cpu.int8_linear import DOT_KIND, _int8_linear, check_weight
from kernels.cpu.norm import _rms_norm
from kernels.cpu.numbers import element_of, stored_element_of
from kernels.cpu.rotary import _rotary
from kernels.cpu.runtime import num_threads


class Int8Product:
    """A product's weight, scale and bias, as `int8_linear` takes them, checked once."""

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, in_features: int) -> None:
        check_weight(packed, scale, bias, scale.shape[0], in_features)
        self.kept = packed, scale, bias  # that their addresses stay theirs
        self.out_features, self.in_features = scale.shape[0], in_features
        self.numbers = (
            packed.data_ptr(),
            scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            in_features,
            scale.shape[0],
        )


@dataclass(frozen=True, slots=True)
class Int8Norm:
    """Of `rms_norm`: weight [hidden] in the model's type."""

    weight: torch.Tensor
    eps: float
    weight_offset: float


def before_attention(
    qkv: torch.Tensor,
    update: torch.Tensor,
    residual: torch.Tensor,
    normed: torch.Tensor,
    norm: Int8Norm,
    product: Int8Product,
    head_counts: tuple[int, int],
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """qkv [rows, (num_heads + 2 num_kv_heads) head_size], `normed` is room; all contiguous.

    head_counts: num_heads, num_kv_heads; positions, cos_sin as `rotary`, the rest as `reshape_and_cache` takes it.
    `slot_mapping` may have fewer tokens than there are rows.
    """
    rows, hidden = update.shape
    num_heads, num_kv_heads = head_counts
    head_size = key_cache.shape[3]
    if product.in_features != hidden or qkv.shape != (rows, product.out_features):
        raise ValueError(f"a product of {product.in_features} inputs does not fit {hidden} and {tuple(qkv.shape)}")
    if product.out_features != (num_heads + 2 * num_kv_heads) * head_size:
        raise ValueError(f"{product.out_features} outputs are not {head_counts} query and key heads of {head_size}")
    _before_attention(
        element_of(qkv, update, residual, normed, norm.weight),
        DOT_KIND,
        stored_element_of(key_cache, value_cache),
        qkv.data_ptr(),
        update.data_ptr(),
        residual.data_ptr(),
        normed.data_ptr(),
        rows,
        norm.weight.data_ptr(),
        np.float32(norm.eps),
        np.float32(norm.weight_offset),
        product.numbers,
        (num_heads, num_kv_heads),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        tuple(cos_sin.shape),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        tuple(key_cache.shape),
        slot_mapping.data_ptr(),
        slot_mapping.shape[0],
        qkv.element_size(),
        num_threads(),
    )


def after_attention(
    update: torch.Tensor,
    attended: torch.Tensor,
    residual: torch.Tensor,
    normed: torch.Tensor,
    inner: torch.Tensor,
    attention_out: Int8Product,
    norm: Int8Norm,
    mlp_in: Int8Product,
    mlp_out: Int8Product,
) -> None:
    """update [rows, hidden] from attended [rows, num_heads * head_size]; all contiguous.

    `normed` [rows, hidden] and `inner` [rows, 3 n] are room: gate and up [rows, 2 n], and then their product [rows, n].
    """
    rows, hidden = update.shape
    size = mlp_out.in_features
    if (attention_out.out_features, mlp_in.in_features, mlp_out.out_features) != (hidden, hidden, hidden):
        raise ValueError(f"products do not fit {hidden} numbers a row")
    if attended.shape != (rows, attention_out.in_features) or inner.shape != (rows, 3 * size):
        raise ValueError(f"attended {tuple(attended.shape)} or inner {tuple(inner.shape)} does not fit the products")
    if mlp_in.out_features != 2 * size:
        raise ValueError(f"{mlp_in.out_features} outputs are not gate and up of {size}")
    _after_attention(
        element_of(update, attended, residual, normed, inner, norm.weight),
        DOT_KIND,
        update.data_ptr(),
        attended.data_ptr(),
        residual.data_ptr(),
        normed.data_ptr(),
        inner.data_ptr(),
        inner.data_ptr() + rows * 2 * size * inner.element_size(),
        rows,
        attention_out.numbers,
        norm.weight.data_ptr(),
        np.float32(norm.eps),
        np.float32(norm.weight_offset),
        mlp_in.numbers,
        mlp_out.numbers,
        num_threads(),
    )


@njit(nogil=True)
def _multiply(element, kind, out, x, rows, product, num_threads):  # type: ignore[no-untyped-def]
    weight, scale, bias, num_in, num_out = product
    _int8_linear(element, kind, out, num_out, x, num_in, rows, num_in, num_out, weight, scale, bias, num_threads)


@njit(nogil=True, cache=True)
def _before_attention(  # type: ignore[no-untyped-def]
    element,
    kind,
    stored_element,
    qkv,
    update,
    residual,
    normed,
    rows,
    norm_weight,
    eps,
    weight_offset,
    product,
    head_counts,
    positions,
    cos_sin,
    cos_sin_shape,
    key_cache,
    value_cache,
    cache_shape,
    slots,
    num_tokens,
    element_bytes,
    num_threads,
):
    hidden, width = product[3], product[4]
    num_heads, num_kv_heads = head_counts
    head_size = cache_shape[3]
    key = qkv + num_heads * head_size * element_bytes
    value = key + num_kv_heads * head_size * element_bytes
    _rms_norm(element, normed, update, norm_weight, residual, rows, hidden, eps, weight_offset, num_threads)
    _multiply(element, kind, qkv, normed, rows, product, num_threads)
    query_shape = (rows, num_heads, head_size)
    _rotary(element, qkv, width, query_shape, key, width, num_kv_heads, positions, cos_sin, cos_sin_shape, num_threads)
    _reshape_and_cache(
        element, stored_element, key, width, value, width, key_cache, value_cache, cache_shape, slots, num_tokens
    )


@njit(nogil=True, cache=True)
def _after_attention(  # type: ignore[no-untyped-def]
    element,
    kind,
    update,
    attended,
    residual,
    normed,
    inner,
    activated,
    rows,
    attention_out,
    norm_weight,
    eps,
    weight_offset,
    mlp_in,
    mlp_out,
    num_threads,
):
    hidden, size = mlp_out[4], mlp_out[3]
    _multiply(element, kind, update, attended, rows, attention_out, num_threads)
    _rms_norm(element, normed, update, norm_weight, residual, rows, hidden, eps, weight_offset, num_threads)
    _multiply(element, kind, inner, normed, rows, mlp_in, num_threads)
    _silu_and_mul(element, activated, inner, rows, size, num_threads)
    _multiply(element, kind, update, activated, rows, mlp_out, num_threads)
