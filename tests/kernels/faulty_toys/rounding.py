"""Multiplies float32 numbers as Triton does where nothing is said of precision: with 11 of their 24 bits."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from kernels.gpu.variant import Variant


@triton.jit
def _rounding_kernel(out, x, SIZE: tl.constexpr):
    line = tl.arange(0, SIZE)
    tile = line[:, None] * SIZE + line[None, :]
    tl.store(out + tile, tl.dot(tl.load(x + tile), tl.load(x + tile)))


def variants() -> Iterator[Variant]:
    yield Variant("rounding", _rounding_kernel, {"out": "*fp32", "x": "*fp32"}, {"SIZE": 16})
