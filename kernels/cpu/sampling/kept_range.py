"""The smallest logit that a row's filters keep, without sorting the row; see `kernels.oracles.reference.kept_range`.

min-p is a difference to the largest logit. top-k: the k-th largest of the chunks' maxima bounds the k-th largest logit
from below, because each of k chunks has a logit that large; the few logits above it are selected from exactly. top-p:
the weights go into bins by their distance to the largest logit, `distance * _BINS_PER_NAT`, which never falls as logits
fall; only the bin in which the sum passes `top_p` is sorted. Chunks without a logit that is kept so far are skipped.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import num_threads
from kernels.cpu.sampling.doubles import weigh
from kernels.cpu.sampling.selection import kth_largest, position_of, sort_falling, sort_key
from kernels.oracles.reference_sampling import CHUNK_SIZE

_BINS = 2048
_BINS_PER_NAT = 48.0  # the last bin takes what is more than 42 below the largest: less than 1e-18 of its weight each


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
    """See `kernels.oracles.reference.kept_range`; all contiguous."""
    columns = (smallest, logits, maxima, largest, temperature, min_p, top_k, top_p)
    _kept_range(*(column.numpy() for column in columns), num_threads())


@njit(nogil=True, parallel=True, cache=True)
def _kept_range(  # type: ignore[no-untyped-def]
    smallest, logits, maxima, largest, temperature, min_p, top_k, top_p, num_threads
):
    count, vocab_size = logits.shape
    threads = min(num_threads, count)
    for thread in prange(threads):
        candidates, keys = np.empty(vocab_size, np.float32), np.empty(vocab_size, np.int64)
        of_chunks = np.empty(maxima.shape[1], np.float32)
        bins = np.empty(_BINS)
        for row in range(thread, count, threads):
            best = largest[row]
            smallest[row] = -np.inf
            if temperature[row] == 0 or not np.isfinite(best):
                continue
            bound = np.float32(-np.inf)
            if min_p[row] > 0:
                bound = np.float32(np.float64(best) + np.float64(temperature[row]) * math.log(np.float64(min_p[row])))
            if 0 < top_k[row] < vocab_size:
                bound = max(bound, _top_k(logits[row], maxima[row], bound, top_k[row], of_chunks, candidates))
            if top_p[row] < 1:
                nats = 1.0 / np.float64(temperature[row])
                bound = max(bound, _top_p(logits[row], maxima[row], best, bound, nats, top_p[row], bins, keys))
            smallest[row] = bound


@njit(nogil=True)
def _top_k(x, maxima, bound, k, of_chunks, candidates):  # type: ignore[no-untyped-def]
    """The k-th largest logit; `bound`, where fewer than k are that large."""
    if k < maxima.size:
        of_chunks[:] = maxima
        bound = max(bound, kth_largest(of_chunks, k))
    num_candidates = 0
    for chunk in range(maxima.size):
        if maxima[chunk] >= bound:
            for i in range(chunk * CHUNK_SIZE, min((chunk + 1) * CHUNK_SIZE, x.size)):
                candidates[num_candidates] = x[i]  # overwritten by the next, unless it is counted
                num_candidates += x[i] >= bound
    if num_candidates < k:
        return bound
    return kth_largest(candidates[:num_candidates], k)


@njit(nogil=True)
def _bin(x, largest, nats):  # type: ignore[no-untyped-def]
    return int(min((np.float64(largest) - x) * nats * _BINS_PER_NAT, _BINS - 1.0))


@njit(nogil=True)
def _top_p(x, maxima, largest, bound, nats, top_p, bins, keys):  # type: ignore[no-untyped-def]
    """The smallest logit before which less than `top_p` of the weight of logits >= `bound` stands."""
    weights = np.empty(CHUNK_SIZE)
    bins[:] = 0.0
    for chunk in range(maxima.size):
        if maxima[chunk] >= bound:
            first, last = chunk * CHUNK_SIZE, min((chunk + 1) * CHUNK_SIZE, x.size)
            weigh(weights, x, first, last, largest, bound, nats)
            for i in range(first, last):
                bins[_bin(x[i], largest, nats)] += weights[i - first]
    limit = np.float64(top_p) * bins.sum()
    passing, before = 0, 0.0
    while passing < _BINS - 1 and before + bins[passing] < limit:
        before += bins[passing]
        passing += 1

    num_keys = 0
    for chunk in range(maxima.size):
        if maxima[chunk] >= bound and _bin(maxima[chunk], largest, nats) <= passing:
            for i in range(chunk * CHUNK_SIZE, min((chunk + 1) * CHUNK_SIZE, x.size)):
                keys[num_keys] = sort_key(x[i], i)  # overwritten by the next, unless it is counted
                num_keys += x[i] >= bound and _bin(x[i], largest, nats) == passing
    sort_falling(keys[:num_keys])
    last_kept = x[position_of(keys[0])]
    for key in keys[:num_keys]:
        if before >= limit:
            break
        last_kept = x[position_of(key)]
        before += math.exp((np.float64(last_kept) - largest) * nats)
    return last_kept
