"""What the card itself can do, measured in the same run: bytes copied and products of matrices, a second."""

from __future__ import annotations

import functools

import torch

from kernels.bench.clock import Clock

_MAX_COPIED_BYTES = 1 << 29  # read and written together; much larger ones are slower on some cards, none is faster
_ALIGNED = 4096  # bytes: of other sizes a GPU copies a few slowly


class Ceilings:
    """Measured once for each size that is asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.copy_gb_per_s = functools.cache(self._copy_gb_per_s)
        self.matrix_tflops = functools.cache(self._matrix_tflops)

    def _copy_gb_per_s(self, num_bytes: int) -> float:
        """Of a copy that reads and writes `num_bytes` together, counting both."""
        half = max(16, min(num_bytes, _MAX_COPIED_BYTES) // 2)
        half -= half % min(half, _ALIGNED)
        device = self._clock.device
        # Random bytes: equal ones cost less power, and a card that is not held back by it is faster than any kernel.
        sources = [
            torch.randint(256, (half,), dtype=torch.uint8, device=device) for _ in range(self._clock.num_sets(2 * half))
        ]
        calls = [functools.partial(torch.empty_like(source).copy_, source) for source in sources]
        return 2 * half / self._clock.time_us(calls) / 1e3

    def _matrix_tflops(self, m: int, n: int, k: int, dtype: torch.dtype) -> float:
        """Of torch's product x [m, k] @ w [n, k]^T, random numbers in both."""
        device = self._clock.device
        num_sets = self._clock.num_sets((m * k + n * k + m * n) * dtype.itemsize)
        sets = [
            (
                torch.empty(m, n, dtype=dtype, device=device),
                torch.randn(m, k, dtype=dtype, device=device),
                torch.randn(n, k, dtype=dtype, device=device),
            )
            for _ in range(num_sets)
        ]
        calls = [functools.partial(torch.matmul, x, w.T, out=out) for out, x, w in sets]
        return 2 * m * n * k / self._clock.time_us(calls) / 1e6
