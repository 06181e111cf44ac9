"""Does not compile: adds vectors of two lengths. And one whose variant forgets an argument."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from kernels.gpu.variant import Variant


@triton.jit
def _broken_kernel(out):
    tl.store(out + tl.arange(0, 32), tl.arange(0, 32) + tl.arange(0, 64))


def variants() -> Iterator[Variant]:
    yield Variant("two lengths", _broken_kernel, {"out": "*i32"}, {})
    yield Variant("nothing given", _broken_kernel, {}, {})
