"""The few largest logits of rows, in order, ties by token id.

    logits     [R, vocab] f32, any stride between rows
    maxima     [R, chunks] f32, of every CHUNK_SIZE tokens
    token_ids, values  [N, K] i64, f32

A program keeps the maxima of a row's chunks in registers and takes the largest K times: each time it reads the one
chunk that has it, finds the token, and puts the largest of what has not been taken of the chunk in its place. Beyond
_MOST tokens, which only a wish for the whole vocabulary asks for, rows are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.sampling.float_order import from_rising_key, rising_key
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant
from kernels.oracles.reference_sampling import CHUNK_SIZE

_MOST = 256


@triton.jit(do_not_specialize=["k"])  # one kernel whatever is asked for
def _top_logits_kernel(  # type: ignore[no-untyped-def]
    token_ids,
    values,
    logits,
    maxima,
    rows,
    k,
    vocab_size,
    num_chunks,
    logits_stride,
    CHUNKS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    chunks = tl.arange(0, CHUNKS)
    of_chunks = tl.load(maxima + row * num_chunks + chunks, chunks < num_chunks, float("-inf"))
    is_bad = tl.max((of_chunks != of_chunks).to(tl.int32)) > 0
    left = tl.where(chunks < num_chunks, rising_key(of_chunks + 0.0), -1)  # keys; 0.0 is added so that -0.0 is no less
    last_key, last_token = tl.full((), 1 << 33, tl.int64), tl.full((), -1, tl.int32)
    rank = 0
    while rank < k:
        token, value = tl.full((), 0, tl.int32), tl.full((), float("nan"), tl.float32)
        if not is_bad:
            key = tl.max(left)
            chunk = tl.min(tl.where(left == key, chunks, CHUNKS))
            tokens = chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
            x = tl.load(logits + row * logits_stride + tokens, tokens < vocab_size, 0.0)
            keys = tl.where(tokens < vocab_size, rising_key(x + 0.0), -1)
            comes_later = (keys < last_key) | ((keys == last_key) & (tokens > last_token))
            token = tl.min(tl.where(comes_later & (keys == key), tokens, vocab_size))
            value = from_rising_key(key)
            last_key, last_token = key, token
            comes_later &= (keys < key) | (tokens > token)
            left = tl.where(chunks == chunk, tl.max(tl.where(comes_later, keys, -1)), left)
        tl.store(token_ids + sample * k + rank, token.to(tl.int64))
        tl.store(values + sample * k + rank, value)
        rank += 1


def top_logits(
    token_ids: torch.Tensor, values: torch.Tensor, logits: torch.Tensor, maxima: torch.Tensor, rows: torch.Tensor
) -> None:
    """See `kernels.oracles.reference_sampling.top_logits`. Raises ValueError for what does not fit."""
    check_rows("top_logits", logits=logits)
    (count, vocab_size), num_chunks = logits.shape, cdiv(logits.shape[1], CHUNK_SIZE)
    check_contiguous("top_logits", "maxima", maxima, (count, num_chunks), logits)
    check_contiguous("top_logits", "rows", rows, (rows.numel(),), logits)
    k = token_ids.shape[1]
    for name, out in {"token_ids": token_ids, "values": values}.items():
        check_contiguous("top_logits", name, out, (rows.numel(), k), logits)
    if k > vocab_size:
        raise ValueError(f"top_logits: {k} tokens asked for, of a vocabulary of {vocab_size}")
    if not token_ids.numel():
        return
    if k > _MOST:
        _sorted_logits(token_ids, values, logits, maxima, rows)
        return
    tile = next_power_of_2(num_chunks)
    _top_logits_kernel[(rows.numel(),)](
        token_ids,
        values,
        logits,
        maxima,
        rows,
        k,
        vocab_size,
        num_chunks,
        logits.stride(0),
        CHUNKS=tile,
        CHUNK_SIZE=CHUNK_SIZE,
        num_warps=_num_warps(tile),
    )


def _sorted_logits(
    token_ids: torch.Tensor, values: torch.Tensor, logits: torch.Tensor, maxima: torch.Tensor, rows: torch.Tensor
) -> None:
    found = logits[rows].sort(dim=-1, descending=True, stable=True)
    is_bad = maxima[rows].isnan().any(dim=-1, keepdim=True)
    token_ids.copy_(found.indices[:, : token_ids.shape[1]].masked_fill(is_bad, 0))
    values.copy_(found.values[:, : token_ids.shape[1]].masked_fill(is_bad, torch.nan))


def _num_warps(tile: int) -> int:
    return min(max(tile // 512, 1), 16)


def variants() -> Iterator[Variant]:
    """Vocabularies of 32,000, 128,256 and 262,144 tokens."""
    pointers = {"token_ids": "*i64", "values": "*fp32", "logits": "*fp32", "maxima": "*fp32", "rows": "*i64"}
    for vocab_size in (32_000, 128_256, 262_144):
        tile = next_power_of_2(cdiv(vocab_size, CHUNK_SIZE))
        yield Variant(
            f"top_logits of {vocab_size}",
            _top_logits_kernel,
            pointers | dict.fromkeys(["k", "vocab_size", "num_chunks", "logits_stride"], "i32"),
            {"CHUNKS": tile, "CHUNK_SIZE": CHUNK_SIZE},
            num_warps=_num_warps(tile),
            divisible_by_16=(*pointers, "vocab_size", "logits_stride"),
            may_spill=False,
        )
