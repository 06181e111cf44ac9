"""Penalties of tokens that were there before (repetition: Keskar et al. 2019, arXiv:1909.05858), in place.

    x <- (x / repetition where x > 0, else x * repetition) where the token was generated or stands in the prompt
    x <- x - frequency * times generated - presence * (1 where it was generated)

    logits  [R, vocab] f32, any stride between rows
    counts  [C, vocab] i32, twice how often a token was generated, and 1 more where it stands in the prompt

Counts are read whole, logits only of tokens that were there: a row costs 4 bytes a token. As many roundings as in
torch, in its order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.tiles import cdiv
from kernels.gpu.variant import Variant

_BLOCK = 2048  # tokens a program


@triton.jit
def _penalize_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    counts,
    count_rows,
    repetition,
    frequency,
    presence,
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(counts + tl.load(count_rows + entry) * vocab_size + tokens, tokens < vocab_size, 0)
    place = logits + tl.load(rows + entry) * logits_stride + tokens
    x = tl.load(place, seen > 0, 0.0)
    factor, generated = tl.load(repetition + entry), seen >> 1
    x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
    x -= tl.load(frequency + entry) * generated.to(tl.float32)
    x -= tl.where(generated > 0, tl.load(presence + entry), 0.0)
    tl.store(place, x, seen > 0)


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference_sampling.penalize`. Raises ValueError for what does not fit."""
    check_rows("penalize", logits=logits)
    check_contiguous("penalize", "counts", counts, (counts.shape[0], logits.shape[1]), logits)
    for name, column in {
        "rows": rows,
        "count_rows": count_rows,
        "repetition": repetition,
        "frequency": frequency,
        "presence": presence,
    }.items():
        check_contiguous("penalize", name, column, (rows.numel(),), logits)
    if rows.numel():
        _penalize_kernel[(rows.numel(), cdiv(logits.shape[1], _BLOCK))](
            logits,
            rows,
            counts,
            count_rows,
            repetition,
            frequency,
            presence,
            logits.shape[1],
            logits.stride(0),
            BLOCK=_BLOCK,
            enable_fp_fusion=False,  # one rounding an operation, as on the CPU
        )


def variants() -> Iterator[Variant]:
    """Rows that begin at multiples of 16 bytes, as of most vocabularies, and others."""
    pointers = {"logits": "*fp32", "rows": "*i64", "counts": "*i32", "count_rows": "*i64"}
    pointers |= dict.fromkeys(["repetition", "frequency", "presence"], "*fp32")
    for name, aligned in (("aligned", ("logits_stride", "vocab_size")), ("odd", ())):
        yield Variant(
            f"penalize {name} rows",
            _penalize_kernel,
            pointers | dict.fromkeys(["vocab_size", "logits_stride"], "i32"),
            {"BLOCK": _BLOCK},
            divisible_by_16=(*pointers, *aligned),
            may_spill=False,
        )
