"""Weights that were quantised once: found from their numbers alone, and never where a bit of one would change."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.products.few_bits_fit import pack_few_bits
from tests.kernels.few_bits_weights import KINDS, few_bits_weight, unpack

SHAPES = [(1, 32), (48, 64), (97, 288), (60, 1056)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_weights_of_a_file_of_few_bits_are_kept_so_bit_for_bit(
    dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight = few_bits_weight(dtype, out_features, in_features)
    packed = pack_few_bits(weight)
    assert packed is not None and packed.dtype == dtype
    assert torch.equal(bits(unpack(packed, out_features)), bits(weight))


def test_a_weight_may_be_stored_the_other_way_round() -> None:
    weight = few_bits_weight(torch.uint8, 50, 64)
    turned = weight.t().contiguous().t()
    packed, expected = pack_few_bits(turned), pack_few_bits(weight)
    assert not turned.is_contiguous() and packed is not None and expected is not None
    assert torch.equal(packed, expected)


def test_numbers_of_bfloat16_are_read_as_they_are() -> None:
    weight = torch.randint(-8, 8, (50, 64), generator=torch.Generator().manual_seed(0)) * 2.0**-7
    packed, expected = pack_few_bits(weight.bfloat16()), pack_few_bits(weight)
    assert packed is not None and expected is not None and torch.equal(packed, expected)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("place", [(0, 0), (0, 63), (31, 40), (96, 95)])
def test_one_number_that_is_off_by_its_last_bit_keeps_a_weight_as_it_is(
    dtype: torch.dtype, place: tuple[int, int]
) -> None:
    weight = few_bits_weight(dtype, 97, 96)
    bits(weight)[place] ^= 1
    assert pack_few_bits(weight) is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e-30, 1e30])
def test_a_number_that_no_integer_is_keeps_a_weight_as_it_is(number: float) -> None:
    weight = few_bits_weight(torch.int8, 50, 64)
    weight[49, 3] = number
    assert pack_few_bits(weight) is None


def test_zeros_keep_their_sign() -> None:
    for sign in (1.0, -1.0):
        zeros = sign * torch.zeros(3, 32)
        packed = pack_few_bits(zeros)
        assert packed is not None and torch.equal(bits(unpack(packed, 3)), bits(zeros))
    zeros = torch.zeros(3, 32)
    zeros[2, 31] = -0.0
    assert pack_few_bits(zeros) is None
    # A file of Q4_0 has -0 wherever the scale of a group is negative.
    weight = few_bits_weight(torch.int32, 48, 320)
    assert (bits(weight) == bits(torch.tensor(-0.0))).any() and (bits(weight) == 0).any()
    packed = pack_few_bits(weight)
    assert packed is not None and torch.equal(bits(unpack(packed, 48)), bits(weight))


def test_the_lowest_and_the_highest_integer_need_not_be_there() -> None:
    scale = torch.tensor([0.011, -0.37, 3e-6]).half().float()[:, None]
    minimum = torch.tensor([0.019, -1.3, 7e-5]).half().float()[:, None]
    for lowest in range(15):
        integers = torch.arange(32) % (15 - lowest) + lowest
        weight = scale.abs() * integers + minimum
        packed = pack_few_bits(weight)
        assert packed is not None, lowest
        assert torch.equal(bits(unpack(packed, 3)), bits(weight)), lowest
    for largest in (127, 64, 16, 15, 3, 1):
        weight = scale * (torch.arange(32) % (largest + 1))
        packed = pack_few_bits(weight)
        assert packed is not None, largest
        assert torch.equal(bits(unpack(packed, 3)), bits(weight)), largest


def test_groups_that_need_unlike_formats_share_the_one_that_has_room() -> None:
    four, eight = few_bits_weight(torch.int32, 60, 64), few_bits_weight(torch.int8, 36, 64)
    packed = pack_few_bits(torch.cat([four, eight]))
    assert packed is not None and packed.dtype == torch.int8
    assert torch.equal(unpack(packed, 96), torch.cat([four, eight]))
    assert pack_few_bits(torch.cat([few_bits_weight(torch.uint8, 60, 64), eight])) is None


def test_inputs_come_in_whole_groups_and_a_weight_is_not_empty() -> None:
    assert pack_few_bits(torch.zeros(5, 33)) is None
    assert pack_few_bits(torch.zeros(0, 32)) is None
    assert pack_few_bits(torch.zeros(5, 0)) is None
