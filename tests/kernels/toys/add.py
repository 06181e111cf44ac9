"""out = x + y, in two variants."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from kernels.gpu.variant import Variant


@triton.jit
def _add_kernel(out, x, y, num_elements, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_elements
    tl.store(out + places, tl.load(x + places, inside) + tl.load(y + places, inside), inside)


def variants() -> Iterator[Variant]:
    for dtype in ("bf16", "fp32"):
        signature = {**dict.fromkeys(("out", "x", "y"), f"*{dtype}"), "num_elements": "i32"}
        pointers = ("out", "x", "y")
        yield Variant(f"add {dtype}", _add_kernel, signature, {"BLOCK": 512}, divisible_by_16=pointers, may_spill=False)
