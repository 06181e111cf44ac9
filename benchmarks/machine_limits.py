"""What a machine can do at most, measured: bytes that its cores read a second, and float32 products.

The best of several readers and of several shapes, each the best of some rounds: a limit is what nothing has exceeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.cpu.library import library
from kernels.cpu.products.matmul import matmul
from kernels.cpu.products.packed_weight import pack

_READ_BYTES = 512 << 20  # far more than any cache
_AHEAD_BYTES = (0, 1024, 4096, 16384)  # that are asked for before they are read
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
    read = library().read_memory
    place = numbers.data_ptr(), numbers.nbytes, num_threads
    ways: list[Callable[[], Any]] = [numbers.sum, *(partial(read, *place, ahead) for ahead in _AHEAD_BYTES)]
    return numbers.nbytes / min(map(_best_s, ways)) / 1e9


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
