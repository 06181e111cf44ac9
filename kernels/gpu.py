"""Triton kernels for GPUs, behind the signatures of `kernels.reference`.

Each operation is a file of its own: formula, memory layout, kernel and launcher. A row's result depends on that row
(and its sequence's cache) alone. Importing this needs Triton.
"""

from __future__ import annotations

from kernels.reference import (
    copy_blocks,
    gelu,
    gelu_and_mul,
    layer_norm,
    paged_attention,
    reshape_and_cache,
    rms_norm,
    rotary,
    silu_and_mul,
)

__all__ = [
    "copy_blocks",
    "gelu",
    "gelu_and_mul",
    "layer_norm",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary",
    "silu_and_mul",
]
