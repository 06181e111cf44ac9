"""Log-softmax and rank of given tokens, in one pass over their rows; see `kernels.oracles.reference.token_logprobs`."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import num_threads
from kernels.cpu.sampling.numbers import exp
from kernels.oracles.reference_sampling import CHUNK_SIZE


def token_logprobs(
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
    log_sums: torch.Tensor,
    logits: torch.Tensor,
    largest: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """See `kernels.oracles.reference.token_logprobs`; all contiguous."""
    columns = (logprobs, ranks, log_sums, logits, largest, rows, token_ids)
    _token_logprobs(*(column.numpy() for column in columns), num_threads())


@njit(nogil=True, fastmath={"contract", "reassoc", "nsz"})
def _sum_of_exp(x, largest):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(x.size):
        total += exp(x[i] - largest)
    return total


@njit(nogil=True)
def _num_above(x, value):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(x.size):
        count += x[i] > value
    return count


@njit(nogil=True, parallel=True, cache=True)
def _token_logprobs(logprobs, ranks, log_sums, logits, largest, rows, token_ids, num_threads):  # type: ignore[no-untyped-def]
    count, vocab_size = rows.size, logits.shape[1]
    threads = min(num_threads, count)
    for thread in prange(threads):
        for sample in range(thread, count, threads):
            x, best = logits[rows[sample]], largest[rows[sample]]
            if not np.isfinite(best):
                logprobs[sample], log_sums[sample], ranks[sample] = np.nan, np.nan, 1
                continue
            total = 0.0  # of chunks, each in float32
            for first in range(0, vocab_size, CHUNK_SIZE):
                total += np.float64(_sum_of_exp(x[first : first + CHUNK_SIZE], best))
            value = x[token_ids[sample]]
            log_sums[sample] = math.log(total)
            logprobs[sample] = (value - best) - log_sums[sample]
            ranks[sample] = 1 + _num_above(x, value)
