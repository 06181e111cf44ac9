"""The largest logit of every chunk of tokens: the one pass that reads all logits.

    out[r, c] = max(logits[r, CHUNK_SIZE c : CHUNK_SIZE (c + 1)]),  NaN where one is NaN

    logits  [R, vocab] f32, any stride between rows
    out     [R, ceil(vocab / CHUNK_SIZE)] f32

A program reads a segment of 64 chunks, 16 kB, in accesses of 16 bytes where rows are so aligned.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.sampling.weights import SEGMENT_CHUNKS, num_segments, segment_tokens
from kernels.gpu.tiles import cdiv
from kernels.gpu.variant import Variant
from kernels.oracles.reference_sampling import CHUNK_SIZE


@triton.jit
def _chunk_maxima_kernel(  # type: ignore[no-untyped-def]
    out, logits, vocab_size, num_chunks, logits_stride, SEGMENT_CHUNKS: tl.constexpr
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = segment_tokens(segment)
    x = tl.load(logits + row * logits_stride + tokens, tokens < vocab_size, float("-inf"))
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    maxima = tl.where(has_nan, float("nan"), tl.max(x, axis=1))
    chunks = segment * SEGMENT_CHUNKS + tl.arange(0, SEGMENT_CHUNKS)
    tl.store(out + row * num_chunks + chunks, maxima, chunks < num_chunks)


def chunk_maxima(out: torch.Tensor, logits: torch.Tensor) -> None:
    """See `kernels.oracles.reference_sampling.chunk_maxima`. Raises ValueError for what does not fit."""
    check_rows("chunk_maxima", logits=logits)
    (count, vocab_size), num_chunks = logits.shape, cdiv(logits.shape[1], CHUNK_SIZE)
    check_contiguous("chunk_maxima", "out", out, (count, num_chunks), logits)
    if count:
        _chunk_maxima_kernel[(count, num_segments(vocab_size))](
            out, logits, vocab_size, num_chunks, logits.stride(0), SEGMENT_CHUNKS=SEGMENT_CHUNKS
        )


def variants() -> Iterator[Variant]:
    """Rows that begin at multiples of 16 bytes, as of most vocabularies, and others."""
    for name, aligned in (("aligned", ("logits_stride", "vocab_size")), ("odd", ())):
        yield Variant(
            f"chunk_maxima {name} rows",
            _chunk_maxima_kernel,
            {"out": "*fp32", "logits": "*fp32"} | dict.fromkeys(["vocab_size", "num_chunks", "logits_stride"], "i32"),
            {"SEGMENT_CHUNKS": SEGMENT_CHUNKS},
            divisible_by_16=("out", "logits", *aligned),
            may_spill=False,
        )
