"""Compiles every CPU kernel and keeps the machine code on disk: `python -m kernels.cpu.warm_up`.

The library of `native` takes some ten seconds once, numba's code of sampling about as long; with both at hand no start
of a worker waits for a compiler. Nothing depends on a model.
"""

from __future__ import annotations

import sys
import time

import torch

from kernels import cpu
from kernels.cpu.library import library


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


def main() -> None:
    """Compiles what is not there yet."""
    library()
    start = time.perf_counter()
    warm_up_sampling()
    print(f"CPU kernels of sampling: {time.perf_counter() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
