"""What a machine can do at most, measured: bytes that its cores read a second, and float32 products.

The best of several readers and of several shapes, each the best of some rounds: a limit is what nothing has exceeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.products.matmul import matmul
from kernels.cpu.products.packed_weight import pack
from kernels.cpu.vectors.float_tile import prefetch_line
from kernels.cpu.vectors.numbers import FLOAT32, lines

_READ_BYTES = 512 << 20  # far more than any cache
_LINE = 1024  # numbers that are prefetched at once
_AHEAD = 4  # such lines before they are added
_SHAPES = ((128, 3072, 576), (512, 3072, 576), (512, 576, 1536))  # rows, out features, in features
_ROUNDS = 5


@dataclass(frozen=True)
class Limits:
    """Of `num_threads` threads together."""

    num_threads: int
    read_gb_per_s: float
    gflop_per_s: float  # a product and a sum are two


def measure(num_threads: int) -> Limits:
    """About five seconds; sets torch's number of threads."""
    torch.set_num_threads(num_threads)
    return Limits(num_threads, _read_gb_per_s(num_threads), max(_gflop_per_s(*shape) for shape in _SHAPES))


def _read_gb_per_s(num_threads: int) -> float:
    numbers = torch.ones(_READ_BYTES // 4)
    seconds = min(
        _best_s(numbers.sum),
        _best_s(lambda: _add_up(numbers.data_ptr(), numbers.numel() // _LINE, num_threads, False)),
        _best_s(lambda: _add_up(numbers.data_ptr(), numbers.numel() // _LINE, num_threads, True)),
    )
    return numbers.nbytes / seconds / 1e9


def _gflop_per_s(rows: int, out_features: int, in_features: int) -> float:
    weight, x = torch.randn(out_features, in_features), torch.randn(rows, in_features)
    out, packed, other = torch.empty(rows, out_features), pack(weight), weight.t().contiguous()
    seconds = min(_best_s(lambda: matmul(out, x, packed)), _best_s(lambda: torch.mm(x, other, out=out)))
    return 2 * rows * out_features * in_features / seconds / 1e9


def _best_s(run: Callable[[], Any]) -> float:
    run()
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


@njit(nogil=True, fastmath={"reassoc", "nsz"})
def _sum(line):  # type: ignore[no-untyped-def]  # for numba
    total = np.float32(0.0)
    for i in range(line.size):
        total += line[i]
    return total


@njit(nogil=True, parallel=True)
def _add_up(address, count, num_threads, is_asked_for):  # type: ignore[no-untyped-def]  # for numba
    numbers = lines(address, FLOAT32, count, _LINE)
    totals = np.zeros(num_threads, dtype=np.float32)
    for lane in prange(num_threads):
        end = count * (lane + 1) // num_threads
        for i in range(count * lane // num_threads, end):
            if is_asked_for:
                prefetch_line(numbers[min(i + _AHEAD, end - 1)])
            totals[lane] += _sum(numbers[i])
    return totals.sum()
