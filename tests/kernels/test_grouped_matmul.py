"""The products of a mixture of experts: each row with its expert's weight, whatever the experts' shares."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.experts.grouped_matmul import grouped_matmul
from kernels.oracles import reference
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.kernels.rows import DTYPES, gaps_are_untouched, normal, poisoned, strided

TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)


@DTYPES
@pytest.mark.parametrize(
    ("counts", "num_outputs", "size"),
    [
        ([3, 0, 70, 1, 64], 37, 50),  # one without rows, one that fills a tile, one that does not fit in one
        ([0, 0, 1], 150, 130),
        ([2], 10, 33),
        ([0, 700, 0, 0], 20, 16),  # more tiles than a group has
    ],
)
@pytest.mark.parametrize("has_rows", [False, True])
def test_products(dtype: torch.dtype, counts: list[int], num_outputs: int, size: int, has_rows: bool) -> None:
    """Half of them with a bias."""
    num_rows = sum(counts)
    num_tokens = num_rows // 3 + 1 if has_rows else num_rows
    x = strided(normal(num_tokens, size, dtype=dtype))
    weights = normal(len(counts), num_outputs, size, dtype=dtype, seed=1) / size**0.5
    rows = (torch.arange(num_rows, device=DEVICE) * 7) % num_tokens if has_rows else None
    out = poisoned(num_rows, num_outputs, dtype=dtype)
    exact = torch.empty(num_rows, num_outputs, dtype=torch.float64, device=DEVICE)
    bias = normal(len(counts), num_outputs, dtype=dtype, seed=2) if has_rows else None
    grouped_matmul(out, x, weights, starts_of(counts), rows, bias)
    exact_bias = None if bias is None else bias.double()
    reference.grouped_matmul(exact, x.double(), weights.double(), starts_of(counts), rows, exact_bias)
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert gaps_are_untouched(out)


@DTYPES
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    """Row 5 with expert 2, first among others and alone; in the interpreter a row keeps its place in the tile."""
    x, weights = normal(150, 200, dtype=dtype), normal(4, 40, 200, dtype=dtype, seed=1)
    alone = torch.empty(1, 40, dtype=dtype, device=DEVICE)
    grouped_matmul(alone, x, weights, starts_of([0, 0, 1, 0]), torch.tensor([5], device=DEVICE))
    for counts, place in (([40, 1, 100, 9], 41), ([0, 0, 150, 0], 64), ([149, 0, 1, 0], 149)):
        rows = torch.arange(150, device=DEVICE).roll(place - 5)
        assert rows[place] == 5
        out = torch.empty(150, 40, dtype=dtype, device=DEVICE)
        grouped_matmul(out, x, weights, starts_of(counts), rows)
        assert torch.equal(out[place], alone[0])
    if not IS_INTERPRETED:
        grouped_matmul(out, x, weights, starts_of([0, 0, 150, 0]))
        assert torch.equal(out[5], alone[0])


def test_no_row_is_nothing_and_what_does_not_fit_is_refused() -> None:
    x, weights, starts = normal(4, 8), normal(2, 5, 8), starts_of([1, 3])
    out = normal(4, 5)
    grouped_matmul(out[:0], x[:0], weights, starts_of([0, 0]))
    with pytest.raises(ValueError, match=r"out must be \[R, 5\] for R rows, not \(3, 5\)"):
        grouped_matmul(out[:3], x, weights, starts)
    with pytest.raises(ValueError, match=r"weights must be contiguous \(2, 5, 8\)"):
        grouped_matmul(out, x, normal(2, 5, 7), starts)
    with pytest.raises(ValueError, match=r"starts must be contiguous \(3,\)"):
        grouped_matmul(out, x, weights, starts[:2])
    with pytest.raises(ValueError, match="starts must be int32, rows int64"):
        grouped_matmul(out, x, weights, starts.long())
    with pytest.raises(ValueError, match=r"rows must be contiguous \(4,\)"):
        grouped_matmul(out, x, weights, starts, torch.tensor([0], device=DEVICE))


def test_many_rows_of_an_expert_have_the_bits_of_few() -> None:
    """In larger tiles; numpy's sums, whose order is its own, are exact in the interpreter."""
    x, weights = normal(300, 128, dtype=torch.float16), normal(2, 256, 128, dtype=torch.float16, seed=1)
    if IS_INTERPRETED:
        x, weights = (each.clamp(-2, 2).mul(4).round().div(4) for each in (x, weights))
    out, few = (torch.empty(count, 256, dtype=torch.float16, device=DEVICE) for count in (300, 10))
    grouped_matmul(out, x, weights, starts_of([130, 170]))
    exact = torch.cat(
        [part.double() @ weight.double().t() for part, weight in zip(x.split([130, 170]), weights, strict=True)]
    )
    of_terms = zip(x.abs().double().split([130, 170]), weights.abs().double(), strict=True)
    sizes = torch.cat([part @ weight.t() for part, weight in of_terms])
    # 128 roundings of a sum to float32, and one of it to float16.
    assert bool(((out.double() - exact).abs() <= 128 * 2**-24 * sizes + 2**-11 * exact.abs() + 2**-25).all())
    for first, counts in ((3, [10, 0]), (290, [0, 10])):
        grouped_matmul(few, x[first : first + 10], weights, starts_of(counts))
        assert torch.equal(few, out[first : first + 10])
