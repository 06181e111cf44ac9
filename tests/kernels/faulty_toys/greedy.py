"""A product of tiles so large that two stages of them are more shared memory than a block can have."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from kernels.gpu.variant import Variant


@triton.jit
def _greedy_kernel(out, x, y, num_steps, SIZE: tl.constexpr):
    line = tl.arange(0, SIZE)
    tile = line[:, None] * SIZE + line[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for step in range(num_steps):
        total = tl.dot(tl.load(x + step * SIZE * SIZE + tile), tl.load(y + step * SIZE * SIZE + tile), total)
    tl.store(out + tile, total)


def variants() -> Iterator[Variant]:
    signature = {"out": "*fp32", "x": "*bf16", "y": "*bf16", "num_steps": "i32"}
    yield Variant(
        "greedy", _greedy_kernel, signature, {"SIZE": 128}, num_warps=8, num_stages=5, divisible_by_16=("x", "y")
    )
