"""Compiles every CPU kernel and keeps the machine code on disk: `python -m kernels.cpu.warm_up`.

Compiling takes about 20 s once; with its result at hand a worker's first step takes a third of a second longer than the
next. Set-up runs this, so that no start of a worker does. Nothing depends on a model's sizes: only on the dtype.
"""

from __future__ import annotations

import sys
import time

import torch

from kernels import cpu


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
    cpu.gelu(torch.empty(2, 4, dtype=dtype), out[0], is_approximate=True)


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        start = time.perf_counter()
        warm_up(dtype)
        print(f"CPU kernels for {dtype}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
