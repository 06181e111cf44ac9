"""Tensors for tests of row-wise kernels: rows that lie apart, garbage between them, and outputs that start as NaN."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device import DEVICE, IS_INTERPRETED

# Two roundings of the type, and the order of sums.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROUNDED_BFLOAT16 = pytest.mark.skipif(
    IS_INTERPRETED, reason="Triton's interpreter cuts off what a GPU rounds to bfloat16"
)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=ROUNDED_BFLOAT16)], ids=str
)


def strided(rows: torch.Tensor, gap: int = 5) -> torch.Tensor:
    """The same rows, `gap` NaNs after each."""
    count, size = rows.shape
    store = torch.full((count, size + gap), float("nan"), dtype=rows.dtype, device=rows.device)
    store[:, :size] = rows
    return store[:, :size]


def gaps_are_untouched(rows: torch.Tensor) -> bool:
    """Whether what `strided` put behind each row is still there; the last row's is behind the view."""
    count, size = rows.shape
    store = rows.as_strided((count, rows.stride(0)), (rows.stride(0), 1))
    return bool(store[:, size:].isnan().all())


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """From a generator of its own, on the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """NaN wherever a kernel does not write, rows apart."""
    return strided(torch.full(shape, float("nan"), dtype=dtype, device=DEVICE), gap=3)
