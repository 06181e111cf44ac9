"""The compiled product against float64, and its promise: the same bits for any number of rows and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.products.packed_weight import pack
from kernels.cpu.products.records import PANEL
from tests.kernels.cpu_products import matmul
from tests.kernels.few_bits_weights import KINDS, few_bits_weight, pack_float32

SHAPES = [(960, 576), (576, 1536), (60, 157), (1031, 60), (5, 1), (PANEL, 2049), (2 * PANEL + 1, 4100)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, size: int) -> torch.Tensor:
    out = torch.full((x.shape[0], size), float("nan"))
    matmul(out, x, packed, bias)
    return out


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_products_are_those_of_float64(out_features: int, in_features: int, is_biased: bool) -> None:
    weight, x = numbers(out_features, in_features), numbers(37, in_features, seed=1)
    bias = numbers(out_features, seed=2) if is_biased else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    # A float32 sum of n products is off by up to n roundings of the sums of magnitudes; here far fewer.
    magnitudes = x.double().abs() @ weight.double().abs().t() + 1
    errors = (product(x, pack(weight), bias, out_features).double() - exact).abs() / magnitudes
    assert errors.max() < 2e-6


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_in_any_company(out_features: int, in_features: int) -> None:
    packed, bias = pack(numbers(out_features, in_features)), numbers(out_features, seed=2)
    x = numbers(333, in_features, seed=1)
    torch.set_num_threads(1)
    whole = product(x, packed, bias, out_features)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for rows in (*range(1, 12), 17, 64, 333):
            assert torch.equal(product(x[-rows:], packed, bias, out_features), whole[-rows:]), (num_threads, rows)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_weight_that_fits_half_the_bytes_gives_the_same_bits(out_features: int, in_features: int) -> None:
    weight, x = numbers(out_features, in_features).bfloat16(), numbers(19, in_features, seed=1)
    packed = pack(weight.float())
    assert packed.dtype == torch.bfloat16 and torch.equal(packed, pack(weight))
    assert torch.equal(product(x, packed, None, out_features), product(x, packed.float(), None, out_features))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (60, 160), (97, 32), (1031, 64), (50, 2080)])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_weight_of_few_bits_gives_the_bits_of_its_float32_numbers(
    dtype: torch.dtype, out_features: int, in_features: int, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    weight, bias = few_bits_weight(dtype, out_features, in_features), numbers(out_features, seed=2)
    packed, expected = pack(weight), pack_float32(weight)
    assert packed.dtype == dtype and expected.dtype == torch.float32
    for rows in (*range(1, 19), 33, 130):
        x = numbers(rows, in_features + 3, seed=rows)[:, 3:]
        assert torch.equal(
            product(x, packed, bias, out_features).view(torch.int32),
            product(x, expected, bias, out_features).view(torch.int32),
        ), rows


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_more_rows_of_few_bits_than_a_cache_holds_give_the_same_bits(dtype: torch.dtype) -> None:
    weight, x = few_bits_weight(dtype, 60, 4128), numbers(81, 4128, seed=1)
    expected = product(x, pack_float32(weight), None, 60)
    assert torch.equal(product(x, pack(weight), None, 60), expected)
    assert torch.equal(product(x[-1:], pack(weight), None, 60), expected[-1:])


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_numbers_that_are_none_meet_few_bits_as_float32(dtype: torch.dtype) -> None:
    weight, x = few_bits_weight(dtype, 50, 64), numbers(7, 64, seed=1)
    x[2, 5], x[3, 6] = float("nan"), float("inf")
    torch.testing.assert_close(
        product(x, pack(weight), None, 50), product(x, pack_float32(weight), None, 50), rtol=0, atol=0, equal_nan=True
    )


def test_one_number_with_more_bits_keeps_a_weight_in_float32() -> None:
    weight = numbers(50, 3).bfloat16().float()
    weight[49, 2] = 1 + 2**-8
    packed = pack(weight)
    assert packed.dtype == torch.float32 and packed.shape == (2, 3, PANEL)
    assert torch.equal(packed[1, :, :2], weight[48:].t()) and not packed[1, :, 2:].any()


def test_x_and_out_may_be_parts_of_wider_rows_and_nothing_beside_is_touched() -> None:
    weight, wide = numbers(50, 20), numbers(9, 33, seed=1)
    out = torch.full((9, 77), float("nan"))
    matmul(out[:, :50], wide[:, 5:25], pack(weight))
    assert torch.equal(out[:, :50], product(wide[:, 5:25].contiguous(), pack(weight), None, 50))
    assert out[:, 50:].isnan().all()


def test_numbers_that_are_none_stay_in_their_row() -> None:
    x = numbers(20, 30)
    clean = product(x, packed := pack(numbers(50, 30, seed=1)), None, 50)
    x[11] = float("nan")
    spoilt = product(x, packed, None, 50)
    assert spoilt[11].isnan().all()
    rest = torch.arange(20) != 11
    assert torch.equal(spoilt[rest], clean[rest])


def test_no_rows_are_no_work() -> None:
    assert product(torch.empty(0, 7), pack(numbers(5, 7)), None, 5).shape == (0, 5)


def test_what_does_not_fit_is_refused() -> None:
    packed = pack(numbers(50, 20))
    with pytest.raises(ValueError, match="packed for 50 x 19"):
        matmul(torch.empty(2, 50), torch.empty(2, 19), packed)
    with pytest.raises(ValueError, match="packed for 200 x 20"):
        matmul(torch.empty(2, 200), torch.empty(2, 20), packed)
    with pytest.raises(ValueError, match=r"bias \(49,\)"):
        matmul(torch.empty(2, 50), torch.empty(2, 20), packed, torch.empty(49))
    few_bits = pack(few_bits_weight(torch.uint8, 50, 64))
    for in_features in (32, 60, 63, 96):
        with pytest.raises(ValueError, match=f"packed for 50 x {in_features}"):
            matmul(torch.empty(2, 50), torch.empty(2, in_features), few_bits)
    with pytest.raises(TypeError, match="packed as"):
        matmul(torch.empty(2, 50), torch.empty(2, 20), packed.half())
    with pytest.raises(ValueError, match=r"out \(3, 50\)"):
        matmul(torch.empty(3, 50), torch.empty(2, 20), packed)
    with pytest.raises(TypeError, match="bfloat16"):
        matmul(torch.empty(2, 50).bfloat16(), torch.empty(2, 20), packed)
