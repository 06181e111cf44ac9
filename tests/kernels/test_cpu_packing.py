"""Weights packed by compiled code beside what plain torch makes of them, at every level that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.library import at_level
from kernels.cpu.native import build
from kernels.cpu.products.eight_bits import quantize_eight_bits
from kernels.cpu.products.packed_weight import pack, pack_pairs
from kernels.cpu.products.records import PANEL
from kernels.int8_weight import pack_int8, quantize_int8

SIZES = [(1, 1), (5, 16), (48, 17), (49, 96), (100, 33), (150, 64)]


@pytest.fixture(autouse=True, params=build.usable_levels())
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    with at_level(request.param):
        yield


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))


def in_panels(weight: torch.Tensor) -> torch.Tensor:
    out_features, in_features = weight.shape
    panels = weight.new_zeros(-(-out_features // PANEL) * PANEL, in_features)
    panels[:out_features] = weight
    return panels.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_numbers_lie_in_panels_bit_for_bit(sizes: tuple[int, int]) -> None:
    weight = numbers(*sizes)
    weight[0, 0], weight[-1, -1] = float("nan"), -0.0
    assert same_bits(pack(weight), in_panels(weight))
    assert same_bits(pack(weight.bfloat16()), in_panels(weight.bfloat16()))
    assert same_bits(pack(weight.bfloat16(), rows=torch.float32), in_panels(weight.bfloat16()))
    assert same_bits(pack(weight.bfloat16().float()), in_panels(weight.bfloat16()))


def test_one_number_that_bfloat16_has_not_keeps_all_as_float32() -> None:
    weight = numbers(150, 64).bfloat16().float()
    weight[149, 63] = 1 / 3
    assert same_bits(pack(weight), in_panels(weight))


@pytest.mark.parametrize("sizes", [(5, 16), (49, 34), (100, 96)], ids=str)
def test_pairs_lie_in_panels_bit_for_bit(sizes: tuple[int, int]) -> None:
    weight = numbers(*sizes).bfloat16()
    assert torch.equal(pack_pairs(weight).view(torch.int32), in_panels(weight.view(torch.int32)))


def test_pairs_of_a_weight_that_begins_at_an_odd_place() -> None:
    wide = numbers(49 * 34 + 1, 1).bfloat16().flatten()
    for weight in (wide[1:].view(49, 34), wide[: 49 * 33].view(49, 33)[3:4, :32]):
        assert torch.equal(pack_pairs(weight), pack_pairs(weight.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_eight_bits_are_those_of_the_formula(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    weight = numbers(*sizes).to(dtype)
    weight[0] = 0
    weight[-1] *= 1e-42  # a scale below the least normal number
    quantized, expected_scale = quantize_int8(weight)
    packed, scale = quantize_eight_bits(weight)
    assert torch.equal(scale, expected_scale) and torch.equal(packed, pack_int8(quantized))


def test_an_output_that_holds_nan_has_no_scale() -> None:
    weight = numbers(20, 64)
    weight[3, 40] = float("nan")
    packed, scale = quantize_eight_bits(weight)
    assert scale.isnan().nonzero().flatten().tolist() == [3]
    quantized, _ = quantize_int8(weight[4:])
    assert torch.equal(packed[1], pack_int8(quantized[12:])[0])


def test_a_weight_may_lie_column_by_column_or_within_another() -> None:
    wide = numbers(60, 200)
    for weight in (wide[:, 7:71], wide.t()[:64]):
        assert same_bits(pack(weight), in_panels(weight))
        assert torch.equal(quantize_eight_bits(weight)[0], quantize_eight_bits(weight.contiguous())[0])
