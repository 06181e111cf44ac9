"""Paged attention on a CPU: formula and arguments as in `kernels.oracles.reference.paged_attention`.

The code, and what is promised of a row's bits: native/attention.cpp.
"""

from __future__ import annotations

import struct

import torch

from kernels.cpu.elements import check_cache, check_heads, check_integers, element_of, stored_element_of
from kernels.cpu.library import library, num_threads

_ATTENTION = struct.Struct("=6q7q7q2fq")  # `Attention` of native/attention.h


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int = 0,
    logit_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    is_batch_invariant: bool = False,
) -> None:
    """See `kernels.oracles.reference.paged_attention`. `out` may be strided in its first dimension. A token's bits
    depend on nothing beside it in any case.

    out and query are float32 or bfloat16; the caches are either of them, or float16, whatever is computed in.
    """
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    if num_heads % num_kv_heads or query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} does not fit a cache of {tuple(key_cache.shape)}")
    if out.shape != query.shape:
        raise ValueError(f"out {tuple(out.shape)} does not fit query {tuple(query.shape)}")
    check_heads(out=out, query=query)
    check_cache(key_cache, value_cache)
    check_integers(torch.int32, block_tables=block_tables, seq_lens=seq_lens, query_starts=query_starts)
    if len(query_starts) != len(seq_lens) + 1 or len(block_tables) < len(seq_lens):
        starts, tables = len(query_starts), len(block_tables)
        raise ValueError(f"{starts} query starts or {tables} block tables do not fit {len(seq_lens)} sequences")
    for name, numbers in (("slopes", alibi_slopes), ("sinks", sinks)):
        if numbers is None:
            continue
        if numbers.dtype != torch.float32 or numbers.shape != (num_heads,) or not numbers.is_contiguous():
            raise ValueError(f"{name} {tuple(numbers.shape)} of {numbers.dtype} are not {num_heads} float32 in a row")
    passed = _ATTENTION.pack(
        element_of(out, query),
        out.data_ptr(),
        out.stride(0),
        query.data_ptr(),
        query.stride(0),
        num_heads,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        stored_element_of(key_cache, value_cache),
        *key_cache.shape,
        block_tables.data_ptr(),
        block_tables.stride(0),
        seq_lens.data_ptr(),
        query_starts.data_ptr(),
        seq_lens.shape[0],
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        sliding_window,
        scale,
        logit_soft_cap,
        0 if sinks is None else sinks.data_ptr(),
    )
    library().paged_attention(passed, num_threads())
