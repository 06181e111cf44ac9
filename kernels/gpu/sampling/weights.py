"""Weights of logits as integers, inside Triton kernels, and their sums over segments of rows.

    weight = floor(2^40 exp((x - largest) / temperature)),  0 where x is not kept

The exponential is the hardware's, in float32 within a few 1e-7 of the truth; everything after it is exact: integers sum
to the same total in any order and any split, so a row's result is the same whatever runs beside it. A token whose
weight is less than 2^-40 of the largest cannot be drawn. Sums of 2^23 tokens fit.

    logits   [R, vocab] f32, any stride between rows
    maxima   [R, chunks] f32, of every CHUNK_SIZE tokens
    weights  [R, segments] i64, of every SEGMENT_SIZE tokens
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.tiles import cdiv
from kernels.oracles.reference_sampling import CHUNK_SIZE

SEGMENT_CHUNKS = 64
SEGMENT_SIZE = SEGMENT_CHUNKS * CHUNK_SIZE
ONE = 2.0**40  # the weight of the largest

_CHUNK: tl.constexpr = tl.constexpr(CHUNK_SIZE)
_SEGMENT_CHUNKS: tl.constexpr = tl.constexpr(SEGMENT_CHUNKS)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_ONE: tl.constexpr = tl.constexpr(ONE)
# Colder than this the largest logit has all of the weight, and one over the temperature would overflow.
_COLDEST: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def halvings(temperature):  # type: ignore[no-untyped-def]
    """How often a logit's distance of 1 halves its weight."""
    return _LOG2_E / tl.maximum(temperature, _COLDEST)


@triton.jit
def weigh(x, largest, halvings):  # type: ignore[no-untyped-def]
    """int64, of x <= largest."""
    return (tl.exp2((x - largest) * halvings) * _ONE).to(tl.int64)


@triton.jit
def is_finite(x):  # type: ignore[no-untyped-def]
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def min_p_bound(largest, temperature, min_p):  # type: ignore[no-untyped-def]
    """The smallest logit that min-p keeps, rounded once from float64; -inf where it is off."""
    margin = temperature.to(tl.float64) * tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64))
    return tl.where(min_p > 0, (largest.to(tl.float64) + margin).to(tl.float32), float("-inf"))


@triton.jit
def segment_tokens(segment):  # type: ignore[no-untyped-def]
    """Token ids of a segment, [chunks, tokens of each]."""
    chunks = segment * _SEGMENT_CHUNKS + tl.arange(0, _SEGMENT_CHUNKS)
    return chunks[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]


@triton.jit
def weigh_segment(logits, maxima, vocab_size, num_chunks, segment, largest, smallest, halvings):  # type: ignore[no-untyped-def]
    """Weights of a segment of the row at `logits`, 0 below `smallest`; reads only the chunks that have any."""
    chunks = segment * _SEGMENT_CHUNKS + tl.arange(0, _SEGMENT_CHUNKS)
    best = tl.load(maxima + chunks, chunks < num_chunks, float("-inf"))
    has_any = (best >= smallest) & (weigh(best, largest, halvings) > 0)
    tokens = segment_tokens(segment)
    x = tl.load(logits + tokens, has_any[:, None] & (tokens < vocab_size), float("-inf"))
    return tl.where(x >= smallest, weigh(x, largest, halvings), 0)


def num_segments(vocab_size: int) -> int:
    """Of a row."""
    return cdiv(vocab_size, SEGMENT_SIZE)


def new_segment_weights(logits: torch.Tensor) -> torch.Tensor:
    """Room for the sums of all segments of all rows."""
    return torch.empty(logits.shape[0], num_segments(logits.shape[1]), dtype=torch.int64, device=logits.device)
