"""What a machine can do at most, measured: bytes that its cores read a second, float32 products, and multiply-adds.

The best of several readers and of several shapes, each the best of some rounds: a limit is what nothing has exceeded.
Multiply-adds are of numbers that registers hold: what a product could do if nothing had to be read.
`python -m benchmarks.machine_limits` prints it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.cpu.library import library
from kernels.cpu.products.layer_product import Product
from kernels.cpu.products.packed_weight import pack
from octavo.bench import machine
from octavo.shared.cores import available_cores

_READ_BYTES = 512 << 20  # far more than any cache
_LINE_BYTES = 64
_AHEAD_BYTES = (0, 1024, 4096, 16384)  # that are asked for before they are read
_SHAPES = ((128, 3072, 576), (512, 3072, 576), (512, 576, 1536))  # rows, out features, in features
_MULTIPLY_ADDS = (1000, 10_000)  # items that threads share, and how often each of their sums gets another number
_ROUNDS = 5


@dataclass(frozen=True)
class Limits:
    """Of `num_threads` threads together."""

    num_threads: int
    read_gb_per_s: float
    gflop_per_s: float  # in a large product; a product and a sum are two
    multiply_add_gflop_per_s: float  # where nothing is read


def measure(num_threads: int) -> Limits:
    """About five seconds; sets torch's number of threads."""
    torch.set_num_threads(num_threads)
    reads = MemoryReader(_READ_BYTES, num_threads).gb_per_s()
    return Limits(
        num_threads, reads, max(_gflop_per_s(*shape) for shape in _SHAPES), _multiply_add_gflop_per_s(num_threads)
    )


class MemoryReader:
    """Memory that nothing else uses, and how fast so many threads of the CPU kernels read it."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        self._numbers = torch.ones(num_bytes // _LINE_BYTES * _LINE_BYTES // 4)
        self._num_threads = num_threads

    def gb_per_s(self, num_bytes: int | None = None) -> float:
        """Over the first so many bytes (default: all), as a product reads its weights, and for the best of the ways."""
        num_bytes = min(num_bytes or self._numbers.nbytes, self._numbers.nbytes) // _LINE_BYTES * _LINE_BYTES
        read, place = library().read_memory, self._numbers.data_ptr()
        ways = [lambda ahead=ahead: read(place, num_bytes, self._num_threads, ahead) for ahead in _AHEAD_BYTES]
        return num_bytes / min(map(_best_s, ways)) / 1e9


def _gflop_per_s(rows: int, out_features: int, in_features: int) -> float:
    weight, x = torch.randn(out_features, in_features), torch.randn(rows, in_features)
    out, other = torch.empty(rows, out_features), weight.t().contiguous()
    product = Product.of_floats(pack(weight), None, out_features, in_features)
    seconds = min(_best_s(lambda: product.multiply(out, x)), _best_s(lambda: torch.mm(x, other, out=out)))
    return 2 * rows * out_features * in_features / seconds / 1e9


def _multiply_add_gflop_per_s(num_threads: int) -> float:
    def run() -> int:
        count: int = library().multiply_add(*_MULTIPLY_ADDS, num_threads)
        return count

    return 2 * run() / _best_s(run) / 1e9


def _best_s(run: Callable[[], Any]) -> float:
    run()
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> int:
    """Prints the limits of so many threads."""
    parser = argparse.ArgumentParser(description="Measures how fast this machine reads memory and multiplies.")
    parser.add_argument("--threads", type=int, default=available_cores())
    limits = measure(parser.parse_args().threads)
    print(
        f"{machine.describe()['cpu']}, {limits.num_threads} threads: reads {limits.read_gb_per_s:.1f} GB/s, "
        f"computes {limits.gflop_per_s:.0f} GFLOP/s in a large float32 product, "
        f"and {limits.multiply_add_gflop_per_s:.0f} in multiply-adds alone"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
