"""Counter-based random numbers: Philox4x32-10, a pure function of (key, counter).

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The same
bits as `reference.uniforms`, which says what is key and what is counter; the generator itself is Triton's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous
from kernels.gpu.tiles import cdiv

_BLOCK = 128


@triton.jit
def random_53_bits(seed, sequence_index, position):  # type: ignore[no-untyped-def]
    """int64 in [0, 2^53) for int64 arguments."""
    c0, c1 = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = (sequence_index & 0xFFFFFFFF).to(tl.uint32), (sequence_index >> 32).to(tl.uint32)
    high, low, _, _ = tl.philox(seed, c0, c1, c2, c3)
    return ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)


@triton.jit
def _uniforms_kernel(out, seeds, sequence_indices, positions, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    seed, position = tl.load(seeds + i, mask, 0), tl.load(positions + i, mask, 0)
    bits = random_53_bits(seed, tl.load(sequence_indices + i, mask, 0), position)
    tl.store(out + i, bits.to(tl.float64) * 1.1102230246251565e-16, mask)  # 2^-53


def uniforms(seeds: torch.Tensor, sequence_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See `kernels.oracles.reference_sampling.uniforms`. Raises ValueError for what does not fit."""
    for name, column in {"seeds": seeds, "sequence_indices": sequence_indices, "positions": positions}.items():
        check_contiguous("uniforms", name, column, (seeds.numel(),), seeds)
    out = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    if seeds.numel():
        _uniforms_kernel[(cdiv(seeds.numel(), _BLOCK),)](
            out, seeds, sequence_indices, positions, seeds.numel(), BLOCK=_BLOCK
        )
    return out
