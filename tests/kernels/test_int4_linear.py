"""Products of quantised rows and weights of four bits: against float64, and rows that depend on nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.library import at_level
from kernels.cpu.native.build import usable_levels
from kernels.cpu.products.few_bits_fit import pack_few_bits
from kernels.cpu.products.layer_product import Product
from kernels.cpu.products.records import FORMATS, RecordWeight
from kernels.oracles import reference
from tests.kernels.few_bits_weights import few_bits_weight, unpack

KINDS = {"scales": torch.int32, "scales and minima": torch.uint8}
# out x in: less than a panel, whole panels, neither, many groups.
SIZES = [(1, 32), (96, 64), (60, 160), (1031, 32), (49, 2112)]


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def of(packed: torch.Tensor, out_features: int, in_features: int) -> RecordWeight:
    """What `pack_few_bits` gives, as records."""
    return RecordWeight(FORMATS[packed.dtype], packed.view(torch.uint8).flatten(1), out_features, in_features)


def multiply(out: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    product = Product.of_records(of(packed, out.shape[1], x.shape[1]), bias, are_rows_rounded=True)
    product.multiply(out, x)


class Case:
    """A product of random numbers, some rows much larger than others."""

    def __init__(self, kept: str, num_out: int, num_in: int, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(num_out * 1000 + num_in)
        packed = pack_few_bits(few_bits_weight(KINDS[kept], num_out, num_in), most_bits=4)
        assert packed is not None and packed.dtype == KINDS[kept]
        self.packed, self.bias = packed, torch.randn(num_out, generator=generator)
        self.x = torch.randn(num_rows, num_in, generator=generator) * torch.logspace(-6, 6, num_rows)[:, None]

    def run(self, rows: slice = slice(None), bias: bool = True) -> torch.Tensor:
        x = self.x[rows]
        out = torch.full((x.shape[0], len(self.bias)), float("nan"))
        multiply(out, x, self.packed, self.bias if bias else None)
        return out

    def exact(self, bias: bool) -> torch.Tensor:
        product = reference.rounded_rows(self.x) @ unpack(self.packed, len(self.bias)).double().T
        return product + self.bias.double() if bias else product


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kept", KINDS)
def test_result_is_that_of_the_rounded_rows_and_the_weight_itself(kept: str, size: tuple[int, int], bias: bool) -> None:
    case = Case(kept, *size, num_rows=13)
    exact = case.exact(bias)
    # What float32 sums of groups lose is a matter of the row's size, not of the one result's, which may cancel out.
    of_row = exact.abs().amax(dim=1, keepdim=True)
    assert ((case.run(bias=bias).double() - exact).abs() <= 2e-6 * of_row).all()


@pytest.mark.parametrize("level", usable_levels()[:-1])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 11])
@pytest.mark.parametrize("kept", KINDS)
def test_every_way_to_multiply_gives_the_same_bits(kept: str, num_rows: int, level: str) -> None:
    case = Case(kept, 61, 160, 11)
    expected = case.run()[:num_rows]
    with at_level(level):
        assert torch.equal(case.run(slice(num_rows)), expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kept", KINDS)
def test_a_row_is_the_same_alone_and_beside_any_number_of_others(kept: str, size: tuple[int, int]) -> None:
    case = Case(kept, *size, num_rows=333)
    whole = case.run()
    assert not whole.isnan().any()
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 33, 128, 257):
        assert torch.equal(case.run(slice(rows)), whole[:rows]), rows
    assert torch.equal(case.run(slice(332, 333)), whole[332:])
    torch.set_num_threads(3 - torch.get_num_threads())
    assert torch.equal(case.run(), whole)


@pytest.mark.parametrize(("kept", "first"), [("scales", -8), ("scales and minima", 0)])
@pytest.mark.parametrize("num_in", [64, 1024])
def test_integers_are_multiplied_exactly(kept: str, first: int, num_in: int) -> None:
    """Rows whose largest number is 127 are their own quantised form; results below 2^24 are exact in float32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (9, num_in), generator=generator).float()
    x[:, ::32] = 127
    weight = torch.randint(first, first + 16, (50, num_in), generator=generator).float()
    x[1], weight[3], weight[4] = 127, first, first + 15  # the largest sums, and none of them wraps
    weight[:, 1::32], weight[:, 2::32] = first, first + 15
    packed = pack_few_bits(weight, most_bits=4)
    assert packed is not None and packed.dtype == KINDS[kept]
    out = torch.full((9, 50), float("nan"))
    multiply(out, x, packed)
    assert torch.equal(out, x @ weight.T)


@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_rows_of_zeros_give_the_bias_and_broken_rows_nan(num_rows: int) -> None:
    case = Case("scales and minima", 35, 96, num_rows)
    whole = case.run()
    for row, place, value, expected in (
        (0, slice(None), 0.0, case.bias),
        (0, slice(None), -1e-38, case.bias),
        (num_rows - 1, slice(69, 70), float("nan"), None),
        (num_rows // 2, slice(0, 1), float("inf"), None),
        (num_rows // 2, slice(31, 33), float("-inf"), None),
    ):
        before = case.x.clone()
        case.x[row, place] = value
        out = case.run()
        if expected is None:
            assert out[row].isnan().all()
        else:
            assert torch.equal(out[row], expected)
        others = torch.arange(num_rows) != row
        assert torch.equal(out[others], whole[others])
        case.x = before


@pytest.mark.parametrize("kept", KINDS)
def test_memory_may_be_strided_and_nothing_beside_it_is_touched(kept: str) -> None:
    case = Case(kept, 53, 64, 9)
    room, wide = torch.full((9, 80), -7.0), torch.full((9, 80), float("nan"))
    wide[:, 3:67] = case.x
    multiply(room[:, 11:64], wide[:, 3:67], case.packed, case.bias)
    assert torch.equal(room[:, 11:64], case.run())
    assert (room[:, :11] == -7).all() and (room[:, 64:] == -7).all()


def test_no_rows_are_no_work() -> None:
    assert Case("scales", 37, 32, 0).run().shape == (0, 37)


def test_what_does_not_fit_is_refused() -> None:
    case = Case("scales", 37, 64, 4)
    out, x, eight_bits = torch.empty(4, 37), case.x, pack_few_bits(few_bits_weight(torch.int8, 37, 64))
    assert eight_bits is not None and pack_few_bits(few_bits_weight(torch.int8, 37, 64), most_bits=4) is None
    for arguments, why in (
        ((out, x[:, :32], case.packed), r"weight .* is not in Records.* for 37 x 32"),
        ((out, x[:, :31], case.packed), r"weight .* is not in Records.* for 37 x 31"),
        ((out, x, eight_bits), "rows that are rounded are not multiplied by INT8"),
        ((out[:3], x, case.packed), r"out .* does not fit 37 outputs"),
        ((out, x, case.packed, case.bias.double()), r"bias .* is not float32 for 37 outputs"),
        ((out, x, case.packed, case.bias[:5]), r"bias .* is not float32 for 37 outputs"),
    ):
        with pytest.raises(ValueError, match=why):
            multiply(*arguments)
    with pytest.raises(TypeError, match="float32 or bfloat16, not"):
        multiply(out.bfloat16(), x, case.packed)
    with pytest.raises(ValueError, match=r"weight .* is not in Records.* for 37 x 96"):
        of(case.packed, 37, 96)
