"""Norms and gates that round what they compute: the bits of the two launches that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.operations import (
    quantized_product,
    rms_norm,
    rounded_rms_norm,
    rounded_silu_and_mul,
    silu_and_mul,
)
from kernels.gpu.quantized.rounded_linear import RoundedLinear
from kernels.gpu.quantized.rounded_rows import rounded_rows
from kernels.gpu.quantized.rounding import RoundedRows, Rounding
from tests.kernels.device import DEVICE
from tests.kernels.rows import DTYPES, gaps_are_untouched, normal, strided
from tests.kernels.test_rounded_product import KINDS, weight_of

EPS = 1e-5
E4M3 = torch.float8_e4m3fn
FORMS = {
    "int8": (torch.int8, False, None, 0),
    "int8 static with zero": (torch.int8, False, 0.02, -11),
    "fp8": (E4M3, False, None, 0),
    "fp8 static": (E4M3, False, 0.005, 0),
    "fp8 by group": (E4M3, True, None, 0),
}
by_form = pytest.mark.parametrize("form", FORMS)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


def rounding_of(form: str, size: int) -> Rounding:
    dtype, is_by_group, scale, zero = FORMS[form]
    return Rounding(dtype, size, is_by_group, scale, zero)


def awkward(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes, the first row of zeros, the second with one that is none."""
    spread = torch.logspace(-4, 1, size, dtype=torch.float64, device=DEVICE)
    x = (normal(count, size, dtype=torch.float64) * spread).to(dtype)
    x[0], x[1, size // 3] = 0, float("inf")
    return x


def assert_same(found: RoundedRows, expected: RoundedRows) -> None:
    assert found.rounding == expected.rounding and found.dtype == expected.dtype and len(found) == len(expected)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert (found.scales is None) == (expected.scales is None)
    if found.scales is not None and expected.scales is not None:
        assert found.scales.shape == expected.scales.shape
        assert torch.equal(found.scales[:, : len(found)], expected.scales[:, : len(found)])


@DTYPES
@by_form
@pytest.mark.parametrize(("count", "size", "offset"), [(21, 96, 0.0), (3, 300, 1.0), (2, 2100, 0.0)])
def test_a_norm_rounds_as_two_launches_do(form: str, dtype: torch.dtype, count: int, size: int, offset: float) -> None:
    """With a residual, which takes the sum, and without; hidden sizes that no group divides."""
    # In memory of one layout for both: how rows are aligned decides how many elements a thread loads, and so in which
    # order a row is summed.
    x, weight, rounding = (
        strided(awkward(count, size, dtype), 16),
        normal(size, dtype=dtype, seed=1),
        rounding_of(form, size),
    )
    out = torch.empty_like(x)
    options: dict[str, Any] = {"eps": EPS, "weight_offset": offset}
    rms_norm(out, x, weight, **options)
    assert_same(rounded_rms_norm(x, weight, rounding, **options), rounded_rows(out, rounding))
    before = normal(count, size, dtype=dtype, seed=2)
    expected, residual = strided(before, 16), strided(before, 16)
    rms_norm(out, x, weight, residual=expected, **options)
    found = rounded_rms_norm(x, weight, rounding, residual=residual, **options)
    assert_same(found, rounded_rows(out, rounding))
    assert torch.equal(residual, expected) and gaps_are_untouched(residual)


@DTYPES
@by_form
@pytest.mark.parametrize(("count", "size"), [(3, 96), (2, 700), (2, 2100)])
def test_a_gate_rounds_as_two_launches_do(form: str, dtype: torch.dtype, count: int, size: int) -> None:
    """Rows of one program and of several."""
    x, rounding = awkward(count, 2 * size, dtype), rounding_of(form, size)
    out = x.new_empty(count, size)
    silu_and_mul(out, x)
    assert_same(rounded_silu_and_mul(strided(x), rounding), rounded_rows(out, rounding))


def test_rows_too_long_for_one_program_are_rounded_by_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rounding = normal(3, 600), rounding_of("int8", 300)
    expected = rounded_silu_and_mul(x, rounding)
    monkeypatch.setattr("kernels.gpu.quantized.rounded_silu_and_mul._bound", None)
    monkeypatch.setattr("kernels.gpu.quantized.rounded_silu_and_mul._MOST", 299)
    assert_same(rounded_silu_and_mul(x, rounding), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_products_take_rows_that_are_rounded_already(kind: str) -> None:
    """Unless their inputs have an order of their own."""
    product = quantized_product(weight_of(kind, 37, 300), normal(37))
    assert isinstance(product, RoundedLinear)
    assert (product.rounding is None) == KINDS[kind][0].is_ordered
    x, expected, found = normal(5, 300, seed=3), normal(5, 37), normal(5, 37)
    if product.rounding is None:
        with pytest.raises(ValueError, match="an order of their own"):
            product.multiply(found, rounded_rows(x, rounding_of("fp8 static", 300)))
    else:
        product.multiply(expected, x)
        product.multiply(found, rounded_rows(x, product.rounding))
        assert torch.equal(found, expected)


def test_rows_for_another_product_are_refused() -> None:
    product, out = quantized_product(weight_of("int8", 37, 300), None), normal(5, 37)
    assert isinstance(product, RoundedLinear) and product.rounding is not None
    x, weight = normal(5, 300), normal(300)
    with pytest.raises(ValueError, match=r"rounded_product: 5 rows of Rounding\(dtype=torch.float8_e4m3fn"):
        product.multiply(out, rounded_rows(x, rounding_of("fp8", 300)))
    with pytest.raises(ValueError, match="rounded_product: 4 rows"):
        product.multiply(out, rounded_rows(x[:4], product.rounding))
    with pytest.raises(ValueError, match="rounded_rms_norm: rows of 300 for a product with 96 inputs"):
        rounded_rms_norm(x, weight, rounding_of("int8", 96), eps=EPS)
    with pytest.raises(ValueError, match=r"rounded_silu_and_mul: x must be \(5, 192\)"):
        rounded_silu_and_mul(x, rounding_of("int8", 96))
