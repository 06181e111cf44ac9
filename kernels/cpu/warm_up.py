"""Compiles every CPU kernel and keeps the machine code on disk: `python -m kernels.cpu.warm_up [--tests]`.

Compiling takes a minute or two once; with its result at hand a worker's first step takes a third of a second longer
than the next. Set-up runs this, so that no start of a worker does. Nothing depends on a model's sizes: only on the
dtype. `--tests` also compiles what the suite runs and a worker never, or only by an option: code that another processor
would choose, and a cache of another type than the model's.

A process compiles each inner function once, whichever kernels call it, and shares only whole kernels with others. So a
part below is what has most in common; who needs a kernel of another part stands late enough in its own to find it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from kernels import cpu
from kernels.cpu.layers.layer_stack import LayerStack, LayerWeights, StackStep
from kernels.cpu.layers.layer_workspace import StackShape
from kernels.cpu.pinning import pin_threads
from kernels.cpu.products import int4_linear, int8_linear
from kernels.cpu.products.few_bits import GROUP
from kernels.cpu.products.layer_product import Product
from kernels.cpu.products.matmul import matmul
from kernels.cpu.products.packed_weight import pack, pack_pairs
from kernels.cpu.runtime import num_threads
from kernels.cpu.vectors.dot_products import DOT_KINDS, dot_kind_of_this_cpu
from kernels.cpu.vectors.processor import HAS_PAIRS


def warm_up_attention(dtype: torch.dtype, stored: torch.dtype | None = None) -> None:
    """2 query rows of this type, float32 or bfloat16, over a cache of type `stored`, or the same."""
    rows, cache = torch.zeros(2, 2, 4, dtype=dtype), torch.zeros(1, 1, 2, 4, dtype=stored or dtype)
    lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([[0]], [2], [0, 2]))
    cpu.paged_attention(rows, rows.clone(), cache, cache, *lengths, scale=1.0, max_query_len=2, max_seq_len=2)
    cpu.reshape_and_cache(rows[:, :1], rows[:, :1], cache, cache.clone(), torch.arange(2))


def warm_up_rows(dtype: torch.dtype) -> None:
    """What is done to each row alone, of this type."""
    rows, cos_sin = torch.zeros(2, 2, 4, dtype=dtype), torch.zeros(2, 4)
    cpu.rotary(rows, rows[:, :1].clone(), torch.arange(2), cos_sin)
    cpu.rms_norm(torch.empty(2, 4, dtype=dtype), rows[0], torch.ones(4, dtype=dtype), eps=1e-5)
    cpu.silu_and_mul(torch.empty(2, 2, dtype=dtype), rows[0])
    cpu.gelu(torch.empty(2, 4, dtype=dtype), rows[0], is_approximate=True)
    between, adapters = torch.zeros(1, 2, 1), torch.zeros(2, dtype=torch.int32)
    cpu.lora_shrink(between, rows[0], torch.zeros(1, 1, 4), adapters)
    cpu.lora_expand(torch.empty(2, 4, dtype=dtype), between, torch.zeros(1, 1, 4).mT, adapters, torch.ones(1))


def warm_up_products(dtype: torch.dtype) -> None:
    """Products of rows of this type; those of float32 by a weight in every form that `pack` gives it."""
    cpu.int8_linear(*_rows_and_int8(dtype))
    if dtype == torch.bfloat16:
        if HAS_PAIRS:
            matmul(torch.empty(2, 2), torch.empty(2, 2), pack_pairs(torch.ones(2, 4, dtype=dtype)))
        return
    few_bits = torch.zeros(2, GROUP), torch.arange(2.0 * GROUP).view(2, -1) % 16, torch.arange(-32.0, 32)[None]
    for weight in (*few_bits, torch.ones(2, 4) / 3, torch.ones(2, 4, dtype=torch.bfloat16)):
        matmul(torch.empty(2, len(weight)), torch.empty(2, weight.shape[1]), pack(weight))
    cpu.int4_linear(torch.empty(2, 2), torch.empty(2, GROUP), pack(few_bits[0]))


def warm_up_layers(dtype: torch.dtype, stored: torch.dtype | None = None) -> None:
    """A layer for 2 rows of 8, 2 heads of 4 over 1, an MLP of 2: it knows all kinds of weights."""

    def product(num_in: int, num_out: int) -> Product:
        return Product.of_int8(torch.zeros(1, 1, 8, 16, 4, dtype=torch.uint8), torch.zeros(num_out), None, num_in)

    residual, cache = torch.zeros(2, 8, dtype=dtype), torch.zeros(1, 1, 2, 4, dtype=stored or dtype)
    norm, cos_sin = torch.ones(8, dtype=dtype), torch.zeros(2, 4)
    layer = LayerWeights(norm, product(8, 16), cos_sin, 1.0, 0, product(8, 8), norm, product(8, 4), product(2, 8))
    lengths = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([[0]], [2], [0, 2])]
    step = StackStep(torch.arange(2), torch.arange(2), *lengths)
    LayerStack(StackShape(8, 2, 2, 1, 4, 1e-5, 0.0, 0.0), [layer])(residual, [(cache, cache)], step, torch.arange(2))


def warm_up_other_processors() -> None:
    """The ways to multiply bytes that this processor could choose and does not."""
    for kind in list(DOT_KINDS)[list(DOT_KINDS).index(dot_kind_of_this_cpu()) + 1 :]:
        int8_linear.multiply(DOT_KINDS[kind], *_rows_and_int8(torch.float32), None)
        few_bits = pack(torch.zeros(2, GROUP))
        int4_linear.multiply(DOT_KINDS[kind], torch.empty(2, 2), torch.empty(2, GROUP), few_bits, None)


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
    cpu.uniforms(row, row, row)


def warm_up_pinning() -> None:
    """Leaves the calling thread on its core."""
    pin_threads(sorted(os.sched_getaffinity(0))[: num_threads()])


def _rows_and_int8(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, x, weight and scale of a product with weights of eight bits."""
    rows = torch.zeros(2, 8, dtype=dtype)
    return rows, rows.clone(), torch.zeros(1, 1, 8, 16, 4, dtype=torch.uint8), torch.zeros(8)


def _all_but_attention(dtype: torch.dtype) -> None:
    warm_up_products(dtype)
    warm_up_rows(dtype)
    warm_up_layers(dtype)  # last: it finds the attention of the same type compiled


def _bfloat16() -> None:
    warm_up_attention(torch.bfloat16)
    _all_but_attention(torch.bfloat16)


def _caches_of_other_types() -> None:
    for stored in (torch.float16, torch.bfloat16):
        warm_up_attention(torch.float32, stored)
        warm_up_layers(torch.float32, stored)


# The two first take about as long as the rest, one core each.
PARTS: dict[str, Callable[[], None]] = {
    "attention in float32": lambda: warm_up_attention(torch.float32),
    "all else in float32": lambda: _all_but_attention(torch.float32),
    "bfloat16": _bfloat16,
    "sampling": warm_up_sampling,
    "threads": warm_up_pinning,
}
PARTS_OF_TESTS: dict[str, Callable[[], None]] = {
    "caches of other types": _caches_of_other_types,
    "other processors": warm_up_other_processors,
}


def compile_part(name: str) -> float:
    """Compile one of the parts, by its name; the seconds that it took."""
    start = time.perf_counter()
    (PARTS | PARTS_OF_TESTS)[name]()
    return time.perf_counter() - start


def main() -> None:
    """Each part in a process of its own, as many at once as there are cores."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.warm_up")
    parser.add_argument("--tests", action="store_true", help="also what only tests run")
    names = [*PARTS, *(PARTS_OF_TESTS if parser.parse_args().tests else ())]
    processes = min(len(names), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        for name, seconds in zip(names, pool.map(compile_part, names), strict=True):
            print(f"CPU kernels of {name}: {seconds:.1f} s", file=sys.stderr)
    # Two processes that add to what is kept of one kernel at the same moment may lose one of both: found here.
    for name in names:
        compile_part(name)


if __name__ == "__main__":
    main()
