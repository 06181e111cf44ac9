"""Log-softmax and rank of given tokens.

    log_sum = log(sum exp(x - largest)),  logprob = (x_token - largest) - log_sum,  rank = 1 + #{x > x_token}

    logits              [R, vocab] f32, any stride between rows
    sums, numbers_above [N, segments] f32, i32: of every SEGMENT_SIZE tokens

Two launches: sums of segments, and of these. A segment is summed in float32 by a tree of its own, and so are the
segments: the order is the vocabulary's, never the batch's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.sampling.weights import is_finite, num_segments, segment_tokens
from kernels.gpu.tiles import next_power_of_2
from kernels.gpu.variant import Variant


@triton.jit
def _segment_sums_kernel(  # type: ignore[no-untyped-def]
    sums, numbers_above, logits, largest, rows, token_ids, vocab_size, num_segments, logits_stride
):
    sample, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + sample)
    best = tl.load(largest + row)
    if is_finite(best):
        tokens = segment_tokens(segment)
        place = logits + row * logits_stride
        x = tl.load(place + tokens, tokens < vocab_size, float("-inf"))
        is_above = x > tl.load(place + tl.load(token_ids + sample))
        out = sample * num_segments + segment
        tl.store(sums + out, tl.sum(tl.sum(tl.exp(x - best), axis=1), axis=0))
        tl.store(numbers_above + out, tl.sum(tl.sum(is_above.to(tl.int32), axis=1), axis=0))


@triton.jit
def _logprobs_kernel(  # type: ignore[no-untyped-def]
    logprobs,
    ranks,
    log_sums,
    sums,
    numbers_above,
    logits,
    largest,
    rows,
    token_ids,
    num_segments,
    logits_stride,
    SEGMENTS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    best = tl.load(largest + row)
    logprob, log_sum = tl.full((), float("nan"), tl.float32), tl.full((), float("nan"), tl.float32)
    rank = tl.full((), 1, tl.int64)
    if is_finite(best):
        segments = tl.arange(0, SEGMENTS)
        place, mask = sample * num_segments + segments, segments < num_segments
        log_sum = tl.log(tl.sum(tl.load(sums + place, mask, 0.0)))
        value = tl.load(logits + row * logits_stride + tl.load(token_ids + sample))
        logprob = (value - best) - log_sum
        rank += tl.sum(tl.load(numbers_above + place, mask, 0))
    tl.store(logprobs + sample, logprob)
    tl.store(log_sums + sample, log_sum)
    tl.store(ranks + sample, rank)


def token_logprobs(
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
    log_sums: torch.Tensor,
    logits: torch.Tensor,
    largest: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference_sampling.token_logprobs`. Raises ValueError for what does not fit."""
    check_rows("token_logprobs", logits=logits)
    check_contiguous("token_logprobs", "largest", largest, (logits.shape[0],), logits)
    columns = {"logprobs": logprobs, "ranks": ranks, "log_sums": log_sums, "rows": rows, "token_ids": token_ids}
    for name, column in columns.items():
        check_contiguous("token_logprobs", name, column, (rows.numel(),), logits)
    count, segments = rows.numel(), num_segments(logits.shape[1])
    if not count:
        return
    sums = torch.empty(count, segments, dtype=torch.float32, device=logits.device)
    numbers_above = torch.empty(count, segments, dtype=torch.int32, device=logits.device)
    _segment_sums_kernel[(count, segments)](
        sums, numbers_above, logits, largest, rows, token_ids, logits.shape[1], segments, logits.stride(0)
    )
    _logprobs_kernel[(count,)](
        logprobs,
        ranks,
        log_sums,
        sums,
        numbers_above,
        logits,
        largest,
        rows,
        token_ids,
        segments,
        logits.stride(0),
        SEGMENTS=next_power_of_2(segments),
        num_warps=1,
    )


def variants() -> Iterator[Variant]:
    """A large vocabulary: the first kernel is the same for all."""
    of_segments = {"sums": "*fp32", "numbers_above": "*i32"}
    given = {"logits": "*fp32", "largest": "*fp32", "rows": "*i64", "token_ids": "*i64"}
    answers = {"logprobs": "*fp32", "ranks": "*i64", "log_sums": "*fp32"}
    sizes = dict.fromkeys(["num_segments", "logits_stride"], "i32")
    yield Variant(
        "token_logprobs segments",
        _segment_sums_kernel,
        of_segments | given | {"vocab_size": "i32"} | sizes,
        {},
        divisible_by_16=(*of_segments, *given, "vocab_size", "logits_stride"),
        may_spill=False,
    )
    yield Variant(
        "token_logprobs of 128256",
        _logprobs_kernel,
        answers | of_segments | given | sizes,
        {"SEGMENTS": next_power_of_2(num_segments(128_256))},
        num_warps=1,
        divisible_by_16=(*answers, *of_segments, *given, "logits_stride"),
        may_spill=False,
    )
