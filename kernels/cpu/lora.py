"""Low-rank adapters of many requests in one batch; see `kernels.oracles.reference.lora_shrink` and `lora_expand`.

Each row is multiplied by itself, by float32 numbers whatever its own type is, in the same order in any company. `b`
lies [adapters, rank, outputs] in memory, so that a row's outputs are summed side by side. The code: native/rows.cpp.
"""

from __future__ import annotations

import torch

from kernels.cpu.elements import check_integers, element_of
from kernels.cpu.library import library, num_threads


def num_segments(size: int) -> int:
    """Of `between` for rows of `size` elements."""
    return 1


def lora_shrink(between: torch.Tensor, x: torch.Tensor, a: torch.Tensor, adapters: torch.Tensor) -> None:
    """See `kernels.oracles.reference.lora_shrink`; `a` is contiguous float32, x strided in its first dimension.

    Raises ValueError for shapes that do not fit.
    """
    (count, size), (_, rank, depth) = x.shape, a.shape
    if between.shape != (1, count, rank) or depth != size or not (between.is_contiguous() and a.is_contiguous()):
        raise ValueError(f"between {tuple(between.shape)}, x {tuple(x.shape)} and a {tuple(a.shape)} do not fit")
    _check_adapters(x, between, adapters, a)
    places = between.data_ptr(), x.data_ptr(), x.stride(0), a.data_ptr(), adapters.data_ptr()
    library().lora_shrink(element_of(x), *places, count, size, rank, num_threads())


def lora_expand(
    out: torch.Tensor, between: torch.Tensor, b: torch.Tensor, adapters: torch.Tensor, scales: torch.Tensor
) -> None:
    """See `kernels.oracles.reference.lora_expand`; `b` is float32 and its transpose contiguous, out strided in its
    first dimension, `scales` contiguous.

    Raises ValueError for shapes that do not fit.
    """
    (count, size), (_, outputs, rank) = out.shape, b.shape
    if between.shape != (1, count, rank) or outputs != size or not b.mT.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)}, between {tuple(between.shape)} and b {tuple(b.shape)} do not fit")
    _check_adapters(out, between, adapters, b, scales)
    if scales.shape != (len(b),) or not scales.is_contiguous():
        raise ValueError(f"scales {tuple(scales.shape)} are not one for each of {len(b)} adapters, side by side")
    addresses = between.data_ptr(), b.data_ptr(), adapters.data_ptr(), scales.data_ptr()
    library().lora_expand(element_of(out), out.data_ptr(), out.stride(0), *addresses, count, size, rank, num_threads())


def _check_adapters(rows: torch.Tensor, between: torch.Tensor, adapters: torch.Tensor, *numbers: torch.Tensor) -> None:
    check_integers(torch.int32, adapters=adapters)
    if len(adapters) < len(rows):
        raise ValueError(f"{len(adapters)} rows have adapters, of {len(rows)}")
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise ValueError(f"rows {tuple(rows.shape)} do not lie line by line")
    for tensor in (between, *numbers):
        if tensor.dtype != torch.float32:
            raise ValueError(f"numbers of adapters are float32, not {tensor.dtype}")
