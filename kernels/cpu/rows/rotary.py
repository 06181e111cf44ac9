"""Rotary position embedding in place; see `kernels.oracles.reference.rotary`.

x1, x2 = first and second half of a head's turned elements;  (x1, x2) <- (x1 cos - x2 sin, x2 cos + x1 sin)
"""

from __future__ import annotations

import torch
from numba import njit, prange

from kernels.cpu.runtime import FEW_NUMBERS, num_threads
from kernels.cpu.vectors.numbers import FLOAT32, INT64, element_of, from_float32, lines, to_float32


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """See `reference.rotary`; `cos_sin` is float32; query and key may be strided in their first dimension."""
    _rotary(
        element_of(query, key),
        query.data_ptr(),
        query.stride(0),
        tuple(query.shape),
        key.data_ptr(),
        key.stride(0),
        key.shape[1],
        positions.data_ptr(),
        cos_sin.data_ptr(),
        tuple(cos_sin.shape),
        num_threads(),
    )


@njit(nogil=True, cache=True)
def check_positions(positions_address, num_tokens, num_angles):  # type: ignore[no-untyped-def]
    """Raises IndexError for a position beyond a table of so many: compiled code would read what lies there."""
    positions = lines(positions_address, INT64, 1, num_tokens)[0]
    for t in range(num_tokens):
        if positions[t] < 0 or positions[t] >= num_angles:
            raise IndexError("a position is not within those that have angles")


@njit(nogil=True)
def _rotate(line, num_heads, head_size, angles):  # type: ignore[no-untyped-def]
    half = angles.size // 2
    cos, sin = angles[:half], angles[half:]
    for head in range(num_heads):
        start = head * head_size
        first, second = line[start : start + half], line[start + half : start + 2 * half]
        for i in range(half):
            x1, x2 = to_float32(first[i]), to_float32(second[i])
            first[i] = from_float32(x1 * cos[i] - x2 * sin[i], first[i])
            second[i] = from_float32(x2 * cos[i] + x1 * sin[i], second[i])


@njit(nogil=True)
def rotate_rows(  # type: ignore[no-untyped-def]
    thread,
    threads,
    element,
    query_address,
    query_stride,
    query_shape,
    key_address,
    key_stride,
    num_kv_heads,
    positions_address,
    table_address,
    table_shape,
):
    """Rows `thread`, `thread + threads`, ... of `rotary`: query and key at addresses, strides in elements.

    query_shape: (tokens, heads, head size); table_shape: that of `cos_sin`.
    """
    num_tokens, num_heads, head_size = query_shape
    query = lines(query_address, element, num_tokens, query_stride)
    key = lines(key_address, element, num_tokens, key_stride)
    positions = lines(positions_address, INT64, 1, num_tokens)[0]
    cos_sin = lines(table_address, FLOAT32, table_shape[0], table_shape[1])
    for t in range(thread, num_tokens, threads):
        angles = cos_sin[positions[t]]
        _rotate(query[t], num_heads, head_size, angles)
        _rotate(key[t], num_kv_heads, head_size, angles)


@njit(nogil=True, parallel=True)
def _together(  # type: ignore[no-untyped-def]
    element,
    query_address,
    query_stride,
    query_shape,
    key_address,
    key_stride,
    num_kv_heads,
    positions_address,
    table_address,
    table_shape,
    num_threads,
):
    threads = min(num_threads, query_shape[0])
    for thread in prange(threads):
        rotate_rows(
            thread,
            threads,
            element,
            query_address,
            query_stride,
            query_shape,
            key_address,
            key_stride,
            num_kv_heads,
            positions_address,
            table_address,
            table_shape,
        )


@njit(nogil=True, cache=True)
def _rotary(  # type: ignore[no-untyped-def]
    element,
    query_address,
    query_stride,
    query_shape,
    key_address,
    key_stride,
    num_kv_heads,
    positions_address,
    table_address,
    table_shape,
    num_threads,
):
    check_positions(positions_address, query_shape[0], table_shape[0])
    if query_shape[0] * (query_shape[1] + num_kv_heads) * query_shape[2] <= FEW_NUMBERS:
        rotate_rows(
            0,
            1,
            element,
            query_address,
            query_stride,
            query_shape,
            key_address,
            key_stride,
            num_kv_heads,
            positions_address,
            table_address,
            table_shape,
        )
    else:
        _together(
            element,
            query_address,
            query_stride,
            query_shape,
            key_address,
            key_stride,
            num_kv_heads,
            positions_address,
            table_address,
            table_shape,
            num_threads,
        )
