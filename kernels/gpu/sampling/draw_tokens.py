"""Draws from rows of logits: a random number inverts the running sum of weights, in the order of token ids.

    token = min { t : sum_{i <= t} weight_i > floor(u total / 2^53) },  u the 53 random bits of the sample's counter

    logits   [R, vocab] f32, any stride between rows
    maxima   [R, chunks] f32, of every CHUNK_SIZE tokens
    weights  [R, segments] i64, sums of every SEGMENT_SIZE tokens
    rows, token_ids, seeds, sequence_indices, positions  [N] i64

Two launches. The first sums the weights of every segment, reading only chunks that keep any; the second finds the
segment, the chunk and the token of each sample. After the exponential everything is exact in integers
(`weights`), so a draw depends on nothing beside its row, and a token of weight w is drawn with a probability
of w / total to within 2^-53. A draw differs from the CPU's where the random number lies within some 1e-6 of the border
between two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.sampling.random_bits import random_53_bits
from kernels.gpu.sampling.weights import (
    SEGMENT_CHUNKS,
    halvings,
    is_finite,
    new_segment_weights,
    num_segments,
    weigh,
    weigh_segment,
)
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant
from kernels.oracles.reference_sampling import CHUNK_SIZE


@triton.jit
def _segment_weights_kernel(  # type: ignore[no-untyped-def]
    weights,
    logits,
    maxima,
    largest,
    smallest,
    temperature,
    vocab_size,
    num_chunks,
    num_segments,
    logits_stride,
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, temperature_of = tl.load(largest + row), tl.load(temperature + row)
    if is_finite(best) & (temperature_of > 0):
        row_logits, row_maxima = logits + row * logits_stride, maxima + row * num_chunks
        bound, halving = tl.load(smallest + row), halvings(temperature_of)
        found = weigh_segment(row_logits, row_maxima, vocab_size, num_chunks, segment, best, bound, halving)
        tl.store(weights + row * num_segments + segment, tl.sum(tl.sum(found, axis=1), axis=0))


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    token_ids,
    weights,
    logits,
    maxima,
    largest,
    smallest,
    temperature,
    rows,
    seeds,
    sequence_indices,
    positions,
    vocab_size,
    num_chunks,
    num_segments,
    logits_stride,
    CHUNKS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT_CHUNKS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
):
    sample = tl.program_id(0)
    row = tl.load(rows + sample)
    best, temperature_of = tl.load(largest + row), tl.load(temperature + row)
    x, of_chunks = logits + row * logits_stride, maxima + row * num_chunks
    token_id = tl.full((), 0, tl.int32)
    if is_finite(best):
        if temperature_of == 0:
            chunks = tl.arange(0, CHUNKS)
            is_best = tl.load(of_chunks + chunks, chunks < num_chunks, float("-inf")) == best
            chunk = tl.min(tl.where(is_best, chunks, CHUNKS))
            tokens = chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
            is_best = tl.load(x + tokens, tokens < vocab_size, float("-inf")) == best
            token_id = tl.min(tl.where(is_best, tokens, vocab_size))
        else:
            segments = tl.arange(0, SEGMENTS)
            of_segments = tl.load(weights + row * num_segments + segments, segments < num_segments, 0)
            bits = random_53_bits(
                tl.load(seeds + sample), tl.load(sequence_indices + sample), tl.load(positions + sample)
            )
            target = tl.umulhi(bits.to(tl.uint64) << 11, tl.sum(of_segments).to(tl.uint64)).to(tl.int64)
            segment = tl.sum((tl.cumsum(of_segments, axis=0) <= target).to(tl.int32))
            target -= tl.sum(tl.where(segments < segment, of_segments, 0))

            bound, halving = tl.load(smallest + row), halvings(temperature_of)
            in_segment = tl.arange(0, SEGMENT_CHUNKS)
            found = tl.sum(weigh_segment(x, of_chunks, vocab_size, num_chunks, segment, best, bound, halving), axis=1)
            chunk = tl.sum((tl.cumsum(found, axis=0) <= target).to(tl.int32))
            target -= tl.sum(tl.where(in_segment < chunk, found, 0))

            first = (segment * SEGMENT_CHUNKS + chunk) * CHUNK_SIZE
            tokens = first + tl.arange(0, CHUNK_SIZE)
            value = tl.load(x + tokens, tokens < vocab_size, float("-inf"))
            of_tokens = tl.where(value >= bound, weigh(value, best, halving), 0)
            token_id = first + tl.sum((tl.cumsum(of_tokens, axis=0) <= target).to(tl.int32))
    tl.store(token_ids + sample, token_id.to(tl.int64))


def draw_tokens(
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    maxima: torch.Tensor,
    largest: torch.Tensor,
    smallest: torch.Tensor,
    temperature: torch.Tensor,
    rows: torch.Tensor,
    seeds: torch.Tensor,
    sequence_indices: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference_sampling.draw_tokens`. Raises ValueError for what does not fit."""
    check_rows("draw_tokens", logits=logits)
    (count, vocab_size), num_chunks = logits.shape, cdiv(logits.shape[1], CHUNK_SIZE)
    check_contiguous("draw_tokens", "maxima", maxima, (count, num_chunks), logits)
    for name, column in {"largest": largest, "smallest": smallest, "temperature": temperature}.items():
        check_contiguous("draw_tokens", name, column, (count,), logits)
    counters = {"seeds": seeds, "sequence_indices": sequence_indices, "positions": positions}
    for name, column in ({"token_ids": token_ids, "rows": rows} | counters).items():
        check_contiguous("draw_tokens", name, column, (rows.numel(),), logits)
    if not rows.numel():
        return
    segments, weights = num_segments(vocab_size), new_segment_weights(logits)
    of_rows = (weights, logits, maxima, largest, smallest, temperature)
    sizes = (vocab_size, num_chunks, segments, logits.stride(0))
    _segment_weights_kernel[(count, segments)](*of_rows, *sizes)
    _draw_kernel[(rows.numel(),)](
        token_ids,
        *of_rows,
        rows,
        *counters.values(),
        *sizes,
        CHUNKS=next_power_of_2(num_chunks),
        SEGMENTS=next_power_of_2(segments),
        SEGMENT_CHUNKS=SEGMENT_CHUNKS,
        CHUNK_SIZE=CHUNK_SIZE,
    )


def variants() -> Iterator[Variant]:
    """Vocabularies of 32,000, 128,256 and 262,144 tokens."""
    of_rows = {"weights": "*i64"} | dict.fromkeys(["logits", "maxima", "largest", "smallest", "temperature"], "*fp32")
    of_samples = dict.fromkeys(["token_ids", "rows", "seeds", "sequence_indices", "positions"], "*i64")
    sizes = dict.fromkeys(["vocab_size", "num_chunks", "num_segments", "logits_stride"], "i32")
    aligned = ("vocab_size", "logits_stride")
    yield Variant(
        "draw_tokens segment weights",
        _segment_weights_kernel,
        of_rows | sizes,
        {},
        divisible_by_16=(*of_rows, *aligned),
        may_spill=False,
    )
    for vocab_size in (32_000, 128_256, 262_144):
        yield Variant(
            f"draw_tokens of {vocab_size}",
            _draw_kernel,
            of_samples | of_rows | sizes,
            {
                "CHUNKS": next_power_of_2(cdiv(vocab_size, CHUNK_SIZE)),
                "SEGMENTS": next_power_of_2(num_segments(vocab_size)),
                "SEGMENT_CHUNKS": SEGMENT_CHUNKS,
                "CHUNK_SIZE": CHUNK_SIZE,
            },
            divisible_by_16=(*of_samples, *of_rows, *aligned),
            may_spill=False,
        )
