"""Draws from rows of logits, in one pass over what is kept of each; see `kernels.oracles.reference.draw_tokens`.

Weights are summed chunk by chunk, each chunk in the same order whatever the batch: a draw looks for its chunk among the
sums and then for its token in that chunk. Samples of the same row share the sums.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import num_threads
from kernels.cpu.sampling.doubles import weigh
from kernels.cpu.sampling.random_bits import uniform
from kernels.oracles.reference_sampling import CHUNK_SIZE

_ADDERS = 8  # sums of a chunk that grow side by side


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
    """See `kernels.oracles.reference.draw_tokens`; all contiguous."""
    of_rows = (column.numpy() for column in (logits, maxima, largest, smallest, temperature))
    counters = (column.numpy().view(np.uint64) for column in (seeds, sequence_indices, positions))
    starts = np.searchsorted(rows.numpy(), np.arange(logits.shape[0] + 1))  # of each row's samples
    _draw_tokens(token_ids.numpy(), *of_rows, starts, *counters, num_threads())


@njit(nogil=True, parallel=True, cache=True)
def _draw_tokens(  # type: ignore[no-untyped-def]
    token_ids,
    logits,
    maxima,
    largest,
    smallest,
    temperature,
    starts,
    seeds,
    sequence_indices,
    positions,
    num_threads,
):
    count = logits.shape[0]
    threads = min(num_threads, count)
    for thread in prange(threads):
        sums = np.empty(maxima.shape[1])
        for row in range(thread, count, threads):
            first, last = starts[row], starts[row + 1]
            best = largest[row]
            if first == last:
                continue
            if not np.isfinite(best):
                token_ids[first:last] = 0
                continue
            if temperature[row] == 0:
                token_ids[first:last] = _find(logits[row], maxima[row], best)
                continue
            nats = 1.0 / np.float64(temperature[row])
            _sum_up(sums, logits[row], maxima[row], best, smallest[row], nats)
            for n in range(first, last):
                target = uniform(seeds[n], sequence_indices[n], positions[n]) * sums[-1]
                token_ids[n] = _draw(sums, logits[row], best, smallest[row], nats, target)


@njit(nogil=True)
def _find(x, maxima, largest):  # type: ignore[no-untyped-def]
    """The first token whose logit is the largest."""
    chunk = 0
    while maxima[chunk] < largest:
        chunk += 1
    token_id = chunk * CHUNK_SIZE
    while x[token_id] < largest:
        token_id += 1
    return token_id


@njit(nogil=True)
def _sum_up(sums, x, maxima, largest, smallest, nats):  # type: ignore[no-untyped-def]
    """sums[c] = weight of all that is kept up to the end of chunk c."""
    weights, partial = np.empty(CHUNK_SIZE), np.empty(_ADDERS)
    total = 0.0
    for chunk in range(maxima.size):
        if maxima[chunk] >= smallest:
            first, last = chunk * CHUNK_SIZE, min((chunk + 1) * CHUNK_SIZE, x.size)
            weights[last - first :] = 0.0
            weigh(weights, x, first, last, largest, smallest, nats)
            partial[:] = 0.0
            for i in range(0, CHUNK_SIZE, _ADDERS):
                for adder in range(_ADDERS):
                    partial[adder] += weights[i + adder]
            for adder in range(_ADDERS):
                total += partial[adder]
        sums[chunk] = total


@njit(nogil=True)
def _draw(sums, x, largest, smallest, nats, target):  # type: ignore[no-untyped-def]
    """The first token up to which the weights exceed `target`, which is less than all of them: a number below 1 times
    the total is below the total in float64 as well."""
    chunk = np.searchsorted(sums, target, side="right")
    first, last = chunk * CHUNK_SIZE, min((chunk + 1) * CHUNK_SIZE, x.size)
    weights = np.empty(CHUNK_SIZE)
    weigh(weights, x, first, last, largest, smallest, nats)
    total = sums[chunk - 1] if chunk > 0 else 0.0
    token_id = first
    for i in range(first, last):
        if weights[i - first] > 0:
            token_id = i  # stays, should one sum after the other round to less than the chunk's
            total += weights[i - first]
            if total > target:
                break
    return token_id
