"""New keys and values to their slots in the paged cache; see `kernels.oracles.reference.reshape_and_cache`.

A slot is `block_id * block_size + offset`; the line of a head in a cache [num_blocks, num_kv_heads, block_size,
head_size] is `(block_id * num_kv_heads + head) * block_size + offset`. Memory-bound, and a fraction of what the step's
products read: not worth a parallel loop.
"""

from __future__ import annotations

import torch
from numba import njit

from kernels.cpu import runtime  # noqa: F401 - sets where compiled code is kept
from kernels.cpu.rows.rotary import rotary
from kernels.cpu.vectors.numbers import INT64, element_of, from_float32, lines, stored_element_of, to_float32


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference.reshape_and_cache`; key and value may be strided in their first dimension."""
    _reshape_and_cache(
        element_of(key, value),
        stored_element_of(key_cache, value_cache),
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        tuple(key_cache.shape),
        slot_mapping.data_ptr(),
        slot_mapping.shape[0],
    )


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference.rotary_and_cache`; one after the other."""
    rotary(query, key, positions, cos_sin)
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


@njit(nogil=True)
def _store(source, place):  # type: ignore[no-untyped-def]
    for i in range(source.size):
        place[i] = from_float32(to_float32(source[i]), place[i])


@njit(nogil=True)
def store_token(  # type: ignore[no-untyped-def]
    token,
    element,
    stored_element,
    key_address,
    key_stride,
    value_address,
    value_stride,
    key_cache_address,
    value_cache_address,
    cache_shape,
    slots_address,
    num_tokens,
):
    """Key and value of one token to its slot; arguments as of `reshape_and_cache`, tensors by address and shape."""
    num_blocks, num_kv_heads, block_size, head_size = cache_shape
    key = lines(key_address, element, num_tokens, key_stride)
    value = lines(value_address, element, num_tokens, value_stride)
    key_cache = lines(key_cache_address, stored_element, num_blocks * num_kv_heads * block_size, head_size)
    value_cache = lines(value_cache_address, stored_element, num_blocks * num_kv_heads * block_size, head_size)
    slot = lines(slots_address, INT64, 1, num_tokens)[0, token]
    if slot < 0:
        return
    block, offset = slot // block_size, slot % block_size
    for head in range(num_kv_heads):
        line = (block * num_kv_heads + head) * block_size + offset
        _store(key[token, head * head_size : (head + 1) * head_size], key_cache[line])
        _store(value[token, head * head_size : (head + 1) * head_size], value_cache[line])


@njit(nogil=True, cache=True)
def _reshape_and_cache(  # type: ignore[no-untyped-def]
    element,
    stored_element,
    key_address,
    key_stride,
    value_address,
    value_stride,
    key_cache_address,
    value_cache_address,
    cache_shape,
    slots_address,
    num_tokens,
):
    for token in range(num_tokens):
        store_token(
            token,
            element,
            stored_element,
            key_address,
            key_stride,
            value_address,
            value_stride,
            key_cache_address,
            value_cache_address,
            cache_shape,
            slots_address,
            num_tokens,
        )
