"""Penalties of tokens that were there before, in one pass over logits and counts; see `reference.penalize`."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import num_threads


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference.penalize`; all contiguous."""
    columns = (logits, rows, counts, count_rows, repetition, frequency, presence)
    _penalize(*(column.numpy() for column in columns), num_threads())


@njit(nogil=True)  # every operation rounds by itself, as in torch
def _penalize_row(x, counts, repetition, frequency, presence):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        value, seen = x[i], counts[i]
        generated = seen >> np.int32(1)
        repeated = value / repetition if value > 0 else value * repetition
        value = repeated if seen > 0 else value
        value -= frequency * np.float32(generated)
        x[i] = value - (presence if generated > 0 else np.float32(0.0))


@njit(nogil=True, parallel=True, cache=True)
def _penalize(logits, rows, counts, count_rows, repetition, frequency, presence, num_threads):  # type: ignore[no-untyped-def]
    threads = min(num_threads, rows.size)
    for thread in prange(threads):
        for i in range(thread, rows.size, threads):
            _penalize_row(logits[rows[i]], counts[count_rows[i]], repetition[i], frequency[i], presence[i])
