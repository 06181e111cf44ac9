"""Compiles every CPU kernel and keeps the machine code on disk: `python -m kernels.cpu.warm_up`.

Compiling takes a minute or two once; with its result at hand a worker's first step takes a third of a second longer
than the next. Set-up runs this, so that no start of a worker does. Nothing depends on a model's sizes: only on the
dtype.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from kernels import cpu
from kernels.cpu.layers.layer_stack import LayerStack, LayerWeights, StackStep
from kernels.cpu.layers.layer_workspace import StackShape
from kernels.cpu.pinning import pin_threads
from kernels.cpu.products.few_bits import GROUP
from kernels.cpu.products.layer_product import Product
from kernels.cpu.products.matmul import matmul
from kernels.cpu.products.packed_weight import pack, pack_pairs
from kernels.cpu.runtime import num_threads
from kernels.cpu.vectors.processor import HAS_PAIRS


def warm_up(dtype: torch.dtype) -> None:
    """Run each kernel once on a few numbers of this type: float32 or bfloat16."""
    query, key, out = (torch.zeros(2, heads, 4, dtype=dtype) for heads in (2, 1, 2))
    key_cache, value_cache = torch.zeros(1, 1, 2, 4, dtype=dtype), torch.zeros(1, 1, 2, 4, dtype=dtype)
    cpu.rotary(query, key, torch.arange(2), torch.zeros(2, 4))
    cpu.reshape_and_cache(key, key, key_cache, value_cache, torch.arange(2))
    cpu.paged_attention(
        out,
        query,
        key_cache,
        value_cache,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        scale=1.0,
        max_query_len=2,
        max_seq_len=2,
    )
    cpu.rms_norm(torch.empty(2, 4, dtype=dtype), out[0], torch.ones(4, dtype=dtype), eps=1e-5)
    cpu.silu_and_mul(torch.empty(2, 2, dtype=dtype), out[0])
    _warm_up_int8(dtype, key_cache)
    matmul(torch.empty(2, 2), torch.empty(2, 4), pack(torch.ones(2, 4, dtype=dtype) / 3))
    if dtype == torch.bfloat16 and HAS_PAIRS:
        matmul(torch.empty(2, 2), torch.empty(2, 2), pack_pairs(torch.ones(2, 4, dtype=dtype)))
    for few_bits in (torch.zeros(2, GROUP), torch.arange(2.0 * GROUP).view(2, -1) % 16, torch.arange(-32.0, 32)[None]):
        matmul(torch.empty(2, len(few_bits)), torch.empty(2, few_bits.shape[1]), pack(few_bits))
    cpu.int4_linear(torch.empty(2, 2), torch.empty(2, GROUP), pack(torch.zeros(2, GROUP)))
    cpu.gelu(torch.empty(2, 4, dtype=dtype), out[0], is_approximate=True)


def _warm_up_int8(dtype: torch.dtype, cache: torch.Tensor) -> None:
    """One product, and a layer for 2 rows of 8, 2 heads of 4 over 1, an MLP of 2: it knows all kinds of weights."""

    def product(num_in: int, num_out: int) -> Product:
        return Product.of_int8(torch.zeros(1, 1, 8, 16, 4, dtype=torch.uint8), torch.zeros(num_out), None, num_in)

    out, residual = torch.zeros(2, 8, dtype=dtype), torch.zeros(2, 8, dtype=dtype)
    cpu.int8_linear(out, residual, torch.zeros(1, 1, 8, 16, 4, dtype=torch.uint8), torch.zeros(8))
    norm, cos_sin = torch.ones(8, dtype=dtype), torch.zeros(2, 4)
    layer = LayerWeights(norm, product(8, 16), cos_sin, 1.0, 0, product(8, 8), norm, product(8, 4), product(2, 8))
    lengths = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([[0]], [2], [0, 2])]
    step = StackStep(torch.arange(2), torch.arange(2), *lengths)
    LayerStack(StackShape(8, 2, 2, 1, 4, 1e-5, 0.0, 0.0), [layer])(residual, [(cache, cache)], step, torch.arange(2))


def warm_up_sampling() -> None:
    """Run each kernel of sampling once: logits are float32 whatever the model is."""
    logits, row = torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)
    zero, half, one = torch.zeros(1), torch.full((1,), 0.5), torch.ones(1)
    cpu.penalize(logits, row, torch.zeros(1, 3, dtype=torch.int32), row, one, zero, zero)
    maxima, token_ids = torch.empty(1, 1), torch.empty_like(row)
    cpu.chunk_maxima(maxima, logits)
    cpu.most_likely(token_ids, torch.empty(1), logits)
    cpu.kept_range(zero, logits, maxima, maxima[:, 0], one, half, row + 1, half)
    cpu.draw_tokens(token_ids, logits, maxima, maxima[:, 0], zero, one, row, row, row, row)
    cpu.token_logprobs(zero, torch.empty_like(row), half, logits, maxima[:, 0], row, token_ids)
    cpu.top_logits(token_ids[:, None], half[:, None], logits, maxima, row)


def warm_up_pinning() -> None:
    """Leaves the calling thread on its core."""
    pin_threads(sorted(os.sched_getaffinity(0))[: num_threads()])


PARTS = {
    "float32": lambda: warm_up(torch.float32),
    "bfloat16": lambda: warm_up(torch.bfloat16),
    "sampling": warm_up_sampling,
    "threads": warm_up_pinning,
}


def compile_part(name: str) -> float:
    """Seconds that it took."""
    start = time.perf_counter()
    PARTS[name]()
    return time.perf_counter() - start


def main() -> None:
    """Each part in a process of its own, as many at once as there are cores."""
    processes = min(len(PARTS), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        for name, seconds in zip(PARTS, pool.map(compile_part, PARTS), strict=True):
            print(f"CPU kernels of {name}: {seconds:.1f} s", file=sys.stderr)
    # Two processes that add to what is kept of one kernel at the same moment may lose one of both: found here.
    for name in PARTS:
        compile_part(name)


if __name__ == "__main__":
    main()
