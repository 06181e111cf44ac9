"""Penalties, maxima, filters, draws and log probabilities of float32 logits. The code: native/sampling_*.cpp.

Signatures and formulas are those of `kernels.oracles.reference_sampling`; everything is contiguous, and what does not
fit raises ValueError. A row's result depends on that row, its parameters and its counter alone.
"""

from __future__ import annotations

import torch

from kernels.cpu.library import library, num_threads
from kernels.oracles.reference_sampling import CHUNK_SIZE  # CHUNK of native/sampling.h

_F32, _I32, _I64, _F64 = torch.float32, torch.int32, torch.int64, torch.float64


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference_sampling.penalize`."""
    vocab_size, (count,) = logits.shape[1], rows.shape
    library().penalize(
        _place(logits, _F32, logits.shape),
        vocab_size,
        _place(rows, _I64, (count,)),
        _place(counts, _I32, (counts.shape[0], vocab_size)),
        _place(count_rows, _I64, (count,)),
        *[_place(penalty, _F32, (count,)) for penalty in (repetition, frequency, presence)],
        count,
        num_threads(),
    )


def chunk_maxima(out: torch.Tensor, logits: torch.Tensor) -> None:
    """See `kernels.oracles.reference_sampling.chunk_maxima`."""
    rows, vocab_size = logits.shape
    maxima = _place_of_maxima(out, rows, vocab_size)
    library().chunk_maxima(maxima, _place(logits, _F32, logits.shape), rows, vocab_size, num_threads())


def most_likely(token_ids: torch.Tensor, largest: torch.Tensor, logits: torch.Tensor) -> None:
    """See `kernels.oracles.reference_sampling.most_likely`."""
    rows, vocab_size = logits.shape
    places = _place(token_ids, _I64, (rows,)), _place(largest, _F32, (rows,)), _place(logits, _F32, logits.shape)
    library().most_likely(*places, rows, vocab_size, num_threads())


def kept_range(
    smallest: torch.Tensor,
    logits: torch.Tensor,
    maxima: torch.Tensor,
    largest: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference_sampling.kept_range`."""
    rows, vocab_size = logits.shape
    library().kept_range(
        _place(smallest, _F32, (rows,)),
        _place(logits, _F32, logits.shape),
        _place_of_maxima(maxima, rows, vocab_size),
        *[_place(column, _F32, (rows,)) for column in (largest, temperature, min_p)],
        _place(top_k, _I64, (rows,)),
        _place(top_p, _F32, (rows,)),
        rows,
        vocab_size,
        num_threads(),
    )


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
    """See `kernels.oracles.reference_sampling.draw_tokens`."""
    (num_rows, vocab_size), (count,) = logits.shape, rows.shape
    library().draw_tokens(
        _place(token_ids, _I64, (count,)),
        _place(logits, _F32, logits.shape),
        _place_of_maxima(maxima, num_rows, vocab_size),
        *[_place(column, _F32, (num_rows,)) for column in (largest, smallest, temperature)],
        *[_place(column, _I64, (count,)) for column in (rows, seeds, sequence_indices, positions)],
        num_rows,
        vocab_size,
        count,
        num_threads(),
    )


def uniforms(seeds: torch.Tensor, sequence_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See `kernels.oracles.reference_sampling.uniforms`."""
    numbers = torch.empty(seeds.shape, dtype=_F64)
    columns = [_place(column, _I64, seeds.shape) for column in (seeds, sequence_indices, positions)]
    library().uniforms(numbers.data_ptr(), *columns, numbers.numel())
    return numbers


def token_logprobs(
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
    log_sums: torch.Tensor,
    logits: torch.Tensor,
    largest: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference_sampling.token_logprobs`."""
    (num_rows, vocab_size), (count,) = logits.shape, rows.shape
    library().token_logprobs(
        _place(logprobs, _F32, (count,)),
        _place(ranks, _I64, (count,)),
        _place(log_sums, _F32, (count,)),
        _place(logits, _F32, logits.shape),
        _place(largest, _F32, (num_rows,)),
        _place(rows, _I64, (count,)),
        _place(token_ids, _I64, (count,)),
        count,
        vocab_size,
        num_threads(),
    )


def top_logits(
    token_ids: torch.Tensor, values: torch.Tensor, logits: torch.Tensor, maxima: torch.Tensor, rows: torch.Tensor
) -> None:
    """See `kernels.oracles.reference_sampling.top_logits`."""
    (num_rows, vocab_size), (count, k) = logits.shape, token_ids.shape
    if k > vocab_size:
        raise ValueError(f"{k} tokens asked for, of a vocabulary of {vocab_size}")
    library().top_logits(
        _place(token_ids, _I64, (count, k)),
        _place(values, _F32, (count, k)),
        _place(logits, _F32, logits.shape),
        _place_of_maxima(maxima, num_rows, vocab_size),
        _place(rows, _I64, (count,)),
        count,
        k,
        vocab_size,
        num_threads(),
    )


def _place(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Where it lies. Raises ValueError where it is not of this type and shape, or not contiguous."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"sampling takes contiguous {dtype} {tuple(shape)} here, not {tensor.dtype} {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def _place_of_maxima(maxima: torch.Tensor, rows: int, vocab_size: int) -> int:
    return _place(maxima, _F32, (rows, -(-vocab_size // CHUNK_SIZE)))
