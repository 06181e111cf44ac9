"""Weights quantised to four bits: near the numbers, the same at every level of instructions, in groups of any size."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import at_level
from kernels.cpu.native.build import usable_levels
from kernels.cpu.products.four_bits import find_four_bits, quantize_four_bits
from kernels.cpu.products.layer_product import Product
from kernels.oracles import reference
from tests.kernels.few_bits_weights import few_bits_weight, unpack_four_bits

# out x in, group: short groups and panels, inputs that are no multiple of 32, other groups than 32 and 128.
SIZES = [(48, 256, 32), (61, 576, 128), (5, 60, 32), (101, 157, 128), (50, 31, 32), (17, 320, 96)]


def numbers(out_features: int, in_features: int) -> torch.Tensor:
    """Outputs of unlike sizes, a few numbers far out."""
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator) * torch.logspace(-3, 1, out_features)[:, None]
    weight[::3, 5] *= 4
    return weight


def by_range(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Fifteen steps from the least number of each group to its greatest."""
    out = torch.empty_like(weight)
    for start in range(0, weight.shape[1], group):
        part = weight[:, start : start + group]
        low = part.amin(dim=1, keepdim=True)
        step = (part.amax(dim=1, keepdim=True) - low) / 15
        out[:, start : start + group] = ((part - low) / step.clamp_min(1e-30)).round() * step + low
    return out


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_quantised_weights_are_nearer_than_those_by_range(size: tuple[int, int, int]) -> None:
    *shape, group = size
    weight = numbers(*shape)
    found = unpack_four_bits(quantize_four_bits(weight, group))
    errors = [(one - weight).norm(dim=1) / weight.norm(dim=1) for one in (found, by_range(weight, group))]
    # Steps of a fifteenth of what 32 to 128 normal numbers span are wrong by 8 to 11 parts in a hundred.
    assert errors[0].mean() < min(0.97 * errors[1].mean(), 0.11) and (errors[0] < 1.01 * errors[1]).all()


def test_inputs_may_be_of_any_type_and_lie_anyhow() -> None:
    weight = numbers(61, 160).bfloat16()
    whole = quantize_four_bits(weight, 32).packed
    assert torch.equal(quantize_four_bits(weight.t().contiguous().t(), 32).packed, whole)
    assert torch.equal(quantize_four_bits(weight.float(), 32).packed, whole)


@pytest.mark.parametrize("level", usable_levels()[:-1])
def test_every_level_quantises_alike(level: str) -> None:
    weight = numbers(61, 157)
    expected = [quantize_four_bits(weight, group).packed for group in (32, 128)]
    with at_level(level):
        for group, packed in zip((32, 128), expected, strict=True):
            assert torch.equal(quantize_four_bits(weight, group).packed, packed)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_rounded_rows_and_the_quantised_weight(size: tuple[int, int, int]) -> None:
    *shape, group = size
    weight = quantize_four_bits(numbers(*shape), group)
    product = Product.of_records(weight, None, are_rows_rounded=True)
    x = torch.randn(9, shape[1], generator=torch.Generator().manual_seed(1))
    exact = reference.rounded_rows(x) @ unpack_four_bits(weight).double().T
    out = torch.full((9, shape[0]), float("nan"))
    product.multiply(out, x)
    assert ((out.double() - exact).abs() <= 2e-6 * exact.abs().amax(dim=1, keepdim=True)).all()
    for rows in range(1, 9):
        some = torch.full((rows, shape[0]), float("nan"))
        product.multiply(some, x[:rows])
        assert torch.equal(some, out[:rows])


def test_numbers_that_are_alike_stay_so_and_nan_makes_its_group_nan() -> None:
    weight = torch.zeros(3, 64)
    weight[1], weight[2, 40] = 0.75, float("nan")
    found = unpack_four_bits(quantize_four_bits(weight, 32))
    assert torch.equal(found[:2], weight[:2])
    assert not found[2, :32].any() and found[2, 32:].isnan().all()


def test_weights_of_four_bits_are_found_and_no_others() -> None:
    weight = few_bits_weight(torch.uint8, 50, 64)
    found = find_four_bits(weight)
    assert found is not None and torch.equal(unpack_four_bits(found), weight)
    assert find_four_bits(few_bits_weight(torch.int8, 50, 64)) is None and find_four_bits(weight.bfloat16()) is None


@pytest.mark.parametrize("group", [0, 16, 48, 288])
def test_other_groups_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 32 inputs up to 256, not {group}"):
        quantize_four_bits(torch.zeros(3, 576), group)
