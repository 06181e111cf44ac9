"""Holds more values at once than a thread has registers for: all are loaded before the first is stored."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from kernels.gpu.variant import Variant


@triton.jit
def _spilling_kernel(out, x, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    values = tl.load(x + places)
    # Only known when all have been summed, and all are wanted again then.
    tl.store(out + places, values / tl.sum(values))


def variants() -> Iterator[Variant]:
    signature = {"out": "*fp32", "x": "*fp32"}
    for may_spill in (False, True):
        name = f"spilling, {'allowed' if may_spill else 'forbidden'}"
        yield Variant(name, _spilling_kernel, signature, {"SIZE": 16384}, num_warps=1, may_spill=may_spill)
