"""Products of eight bits on both sides: rows are rounded as the formats say, sums are exact or nearly so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.gpu.operations import quantized_product
from kernels.gpu.quantized import rounded_linear, segments
from kernels.gpu.quantized.packed_linear import PackedLinear
from kernels.gpu.quantized.rounded_linear import RoundedLinear
from kernels.gpu.quantized.rounded_product import CHUNK
from kernels.gpu.quantized.rounded_rows import rounded_rows
from kernels.gpu.quantized.rounding import Rounding
from kernels.gpu.quantized.segments import Cut
from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight
from tests.kernels.device import DEVICE
from tests.kernels.quantized_formats import Format, exact_weight
from tests.kernels.rows import DTYPES, gaps_are_untouched, normal, poisoned, strided

KINDS = {
    "int8": (Format("", Numbers.INT8, 0), Inputs.INT8, None),
    "int8 static": (Format("", Numbers.INT8, 0), Inputs.INT8, 0.02),
    "int8 static with zero": (Format("", Numbers.INT8, 0), Inputs.INT8, 0.02),
    "fp8": (Format("", Numbers.E4M3, 0), Inputs.E4M3, None),
    "fp8 static": (Format("", Numbers.E4M3, 0, is_ordered=True), Inputs.E4M3, 0.005),
    "fp8 blocks": (Format("", Numbers.E4M3, CHUNK), Inputs.E4M3_BY_GROUP, None),
}
by_kind = pytest.mark.parametrize("kind", KINDS)
# Of rows past the last there are no scales: what comes of them is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def weight_of(kind: str, num_outputs: int, size: int) -> QuantizedWeight:
    form, inputs, scale = KINDS[kind]
    zero = -11 if "zero" in kind else 0
    return replace(form.weight(num_outputs, size), inputs=inputs, input_scale=scale, input_zero=zero)


def expected_rows(x: torch.Tensor, dtype: torch.dtype, group: int, scale: float | None, zero: int = 0) -> torch.Tensor:
    """f64[T, K]: each group of a row rounded by torch, and what its codes stand for."""
    parts = []
    for part in x.float().split(group, dim=1):
        # By numbers on the device: by one of the host a GPU divides as it multiplies by its reciprocal, rounded twice.
        largest = part.abs().amax(1, keepdim=True)
        whole = torch.full_like(largest, LARGEST[dtype])
        by = torch.where(largest == 0, whole, largest) / whole if scale is None else torch.full_like(largest, scale)
        y = (part / by + zero).clamp(-128.0 if zero else -LARGEST[dtype], LARGEST[dtype])
        codes = y.round() if dtype == torch.int8 else y.to(dtype)
        parts.append((codes.double() - zero) * by.double())
    return torch.cat(parts, dim=1)


def cut_off(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """f64[T, N]: by how much a GPU's products of E4M3 rows [T, K] and a matrix [N, K] may be less exact than float32's.

    Matrix units of Hopper add 32 products and the sum so far at once, each cut to 13 bits behind the first bit of the
    largest of these (DeepSeek-V3, 2024, arXiv:2412.19437, section 3.3.2); after 128 the sum is added to in float32.
    """
    terms = torch.nn.functional.pad(rows[:, None] * matrix, (0, -rows.shape[1] % CHUNK)).unflatten(
        2, (-1, CHUNK // 32, 32)
    )
    ends = terms.sum(-1).cumsum(-1)
    begins = ends - terms.sum(-1)
    largest = torch.stack([terms.abs().amax(-1), ends.abs(), begins.abs()]).amax(0)
    return 33 * 2**-13 * largest.sum((-1, -2))


@DTYPES
@pytest.mark.parametrize(
    ("to", "group", "scale", "zero"),
    [
        *[(to, *rest, 0) for to in LARGEST for rest in [(0, None), (0, 0.01), (CHUNK, None)]],
        (torch.int8, 0, 0.01, 5),  # floats are rounded around 0
    ],
)
def test_rows_are_rounded_as_torch_rounds(
    to: torch.dtype, dtype: torch.dtype, group: int, scale: float | None, zero: int
) -> None:
    """Numbers of all sizes, a row of zeros, ties, and codes that fill up."""
    size, padded = 300, 384
    spread = torch.logspace(-4, 0, size, dtype=torch.float64, device=DEVICE)
    x = (normal(5, size, dtype=torch.float64) * spread).to(dtype)
    x[3] = 0
    x[4] = torch.arange(size, device=DEVICE) / 2
    x[4, 0::128] = LARGEST[to]  # of each group: halves are ties
    rows = rounded_rows(strided(x), Rounding(to, size, group > 0, scale, zero))
    codes, scales = rows.codes, rows.scales
    assert codes.shape == (5, padded) and bool((codes[:, size:].float() == zero).all())
    found = codes[:, :size].double() - zero
    if scales is None:
        found *= torch.tensor(scale, dtype=torch.float32).double()
    else:
        found *= scales[:, :5].double().T.repeat_interleave(group or padded, dim=1)[:, :size]
    assert torch.equal(found, expected_rows(x, to, group or size, scale, zero))


@DTYPES
@by_kind
@pytest.mark.parametrize(("count", "num_outputs", "size"), [(1, 37, 300), (67, 70, 1100)])
def test_products(kind: str, dtype: torch.dtype, count: int, num_outputs: int, size: int) -> None:
    """Few rows, with sums that are split between programs, and many; outputs and inputs that no tile divides."""
    weight = weight_of(kind, num_outputs, size)
    x, out = strided(normal(count, size, dtype=dtype)), poisoned(count, num_outputs, dtype=dtype)
    bias = normal(num_outputs, dtype=dtype, seed=2) if count > 1 else None
    product = quantized_product(weight, bias)
    assert isinstance(product, RoundedLinear)
    product.multiply(out, x)
    ordered = x if weight.order is None else x[:, weight.order]
    to = torch.int8 if weight.inputs is Inputs.INT8 else torch.float8_e4m3fn
    rows = expected_rows(ordered, to, min(weight.group, size), weight.input_scale, weight.input_zero)
    matrix = exact_weight(replace(weight, order=None))
    exact = torch.nn.functional.linear(rows, matrix, None if bias is None else bias.double())
    # Sums of integers are exact; of E4M3 float32 rounds a product at most 128 times in a group and once a group. Scales
    # are multiplied with each other and with a sum.
    depth = 4.0 if weight.inputs is Inputs.INT8 else 128 + size / 128 + 4
    size_of_terms = rows.abs() @ matrix.abs().T
    if weight.input_zero and weight.input_scale:  # what it adds is taken off again, rounded with the bias
        size_of_terms += abs(weight.input_zero) * weight.input_scale * matrix.abs().sum(1)
    error = depth * 2**-24 * size_of_terms + 2**-24 * exact.abs()
    if DEVICE == "cuda" and weight.inputs is not Inputs.INT8:
        error += cut_off(rows, matrix)
    rounding = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    assert bool(((out.double() - exact).abs() <= error + rounding * (exact.abs() + error)).all())
    assert gaps_are_untouched(out)


@by_kind
def test_a_row_is_the_same_in_any_company(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are few and far between, so that numpy's sums of 128, whose order is its own, are exact."""
    monkeypatch.setattr(segments, "WANTED_PROGRAMS", 3)
    size, dtype = 1100, torch.float16
    weight = weight_of(kind, 33, size)
    if weight.numbers is Numbers.E4M3:
        weight = replace(weight, codes=(weight.codes & 0xC7) | 0x20)  # 1/8 to 15 / 64, of either sign
    product = quantized_product(weight, None)
    assert product is not None
    assert Cut.of(70, 33, -(-size // CHUNK)).is_split and not Cut.of(130, 33, -(-size // CHUNK)).is_split
    x = normal(130, size).clamp(-2, 2).round().div(2).to(dtype)
    x[:, ::CHUNK] = 1
    whole = torch.empty(130, 33, dtype=dtype, device=DEVICE)
    product.multiply(whole, x)
    for rows in (slice(64, 65), slice(127, 130), slice(20, 90)):
        few = torch.empty_like(whole[rows])
        product.multiply(few, x[rows])
        assert torch.equal(few, whole[rows])


def test_cards_without_such_products_and_formats_without_such_layouts_keep_rows_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_group = replace(Format("", Numbers.E4M3, 64).weight(5, 256), inputs=Inputs.E4M3_BY_GROUP)
    assert isinstance(quantized_product(by_group, None), PackedLinear)
    long = replace(Format("", Numbers.INT8, 0).weight(1, 33000), inputs=Inputs.INT8)
    assert isinstance(quantized_product(long, None), PackedLinear)
    monkeypatch.setattr(rounded_linear, "has_e4m3_products", lambda device: False)
    assert isinstance(quantized_product(weight_of("fp8", 5, 256), None), PackedLinear)
    assert isinstance(quantized_product(weight_of("int8", 5, 256), None), RoundedLinear)


@by_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_does_not_become_one(kind: str, value: float) -> None:
    """In its row alone; where rows have one scale that is given, what is beyond it is cut."""
    x, out = normal(3, 300), normal(3, 5)
    x[1, 7] = value
    product = quantized_product(weight_of(kind, 5, 300), None)
    assert product is not None
    product.multiply(out, x)
    if "static" not in kind:
        assert not out[1].isfinite().any()
    assert out[::2].isfinite().all()


def test_no_row_is_nothing_and_what_does_not_fit_is_refused() -> None:
    product, x, out = quantized_product(weight_of("int8", 5, 40), None), normal(3, 40), normal(3, 5)
    assert product is not None
    product.multiply(out[:0], x[:0])
    with pytest.raises(ValueError, match=r"to \(2, 5\) torch.float32 with a weight \(5, 40\)"):
        product.multiply(out[:2], x)
    with pytest.raises(ValueError, match=r"rounded_product: \(3, 30\)"):
        product.multiply(out, x[:, :30])
    with pytest.raises(ValueError, match=r"bias must be contiguous \(5,\)"):
        wrong = quantized_product(weight_of("fp8", 5, 40), normal(4))
        assert wrong is not None
        wrong.multiply(out, x)
