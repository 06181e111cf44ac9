"""Products with weights of eight bits: against the oracle, in exact integers, and rows that depend on nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.library import at_level
from kernels.cpu.native.build import usable_levels
from kernels.int8_weight import pack_int8, quantize_int8, unpack_int8
from kernels.oracles import reference
from tests.kernels.cpu_products import int8_linear

# out x in: whole panels and groups, neither, less than one of each, more inputs than are multiplied at a time.
SIZES = [(96, 64), (60, 157), (1031, 33), (1, 1), (49, 2100)]


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Case:
    """A product of random numbers, some rows much larger than others."""

    def __init__(self, num_out: int, num_in: int, num_rows: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(num_out * 1000 + num_in)
        weight, self.bias, self.x = (
            torch.randn(shape, generator=generator) for shape in ((num_out, num_in), (num_out,), (num_rows, num_in))
        )
        self.x = (self.x * torch.logspace(-6, 6, num_rows)[:, None]).to(dtype)
        self.quantized, self.scale = quantize_int8(weight)
        self.packed = pack_int8(self.quantized)

    def run(self, rows: slice = slice(None), bias: bool = True) -> torch.Tensor:
        x = self.x[rows]
        out = torch.full((x.shape[0], self.scale.shape[0]), float("nan"), dtype=x.dtype)
        int8_linear(out, x, self.packed, self.scale, self.bias if bias else None)
        return out

    def exact(self, bias: bool = True) -> torch.Tensor:
        out = torch.empty(self.x.shape[0], self.scale.shape[0], dtype=torch.float64)
        reference.int8_linear(out, self.x, self.packed, self.scale, self.bias if bias else None)
        return out


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_is_that_of_the_quantised_numbers(dtype: torch.dtype, size: tuple[int, int], bias: bool) -> None:
    case = Case(*size, num_rows=13, dtype=dtype)
    exact = case.exact(bias)
    # What float32 sums of groups lose is a matter of the row's size, not of the one result's, which may cancel out.
    of_row = exact.abs().amax(dim=1, keepdim=True)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert ((case.run(bias=bias).double() - exact).abs() <= tolerance * of_row).all()


@pytest.mark.parametrize("level", usable_levels()[:-1])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 11])
def test_every_way_to_multiply_gives_the_same_bits(level: str, num_rows: int) -> None:
    case = Case(61, 157, 11)
    expected = case.run()[:num_rows]
    with at_level(level):
        assert torch.equal(case.run(slice(num_rows)), expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_row_is_the_same_alone_and_beside_any_number_of_others(size: tuple[int, int]) -> None:
    case = Case(*size, num_rows=300)
    whole = case.run()
    assert not whole.isnan().any()
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 33, 128, 129, 257):
        assert torch.equal(case.run(slice(rows)), whole[:rows]), rows
    assert torch.equal(case.run(slice(299, 300)), whole[299:])
    torch.set_num_threads(3 - torch.get_num_threads())
    assert torch.equal(case.run(), whole)


@pytest.mark.parametrize(("num_rows", "num_in"), [(2, 1024), (33, 96), (17, 40)])
def test_integers_are_multiplied_exactly(num_rows: int, num_in: int) -> None:
    """Rows whose largest number is 127 are their own quantised form; results below 2^24 are exact in float32."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-127, 128, (n, num_in), generator=generator, dtype=torch.int8) for n in (num_rows, 40))
    x[:, ::32] = 127
    x[1, :], weight[3, :], weight[4, :] = 127, 127, -127  # the largest sums, and none of them wraps or saturates
    out = torch.full((num_rows, 40), float("nan"))
    int8_linear(out, x.float(), pack_int8(weight), torch.ones(40))
    expected = x.int() @ weight.int().t()  # torch._int_mm adds pairs of products in 16 bits on AVX2, and overflows
    assert torch.equal(out, expected.float())


def test_the_longest_rows_do_not_overflow() -> None:
    num_in = 66_000
    x, weight = torch.full((2, num_in), -3.0), torch.full((17, num_in), 127, dtype=torch.int8)
    out = torch.full((2, 17), float("nan"))
    int8_linear(out, x, pack_int8(weight), torch.ones(17))
    torch.testing.assert_close(out, torch.full((2, 17), -3.0 * 127 * num_in), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_rows_of_zeros_give_the_bias_and_broken_rows_nan(dtype: torch.dtype, num_rows: int) -> None:
    case = Case(35, 70, num_rows, dtype)
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
            assert torch.equal(out[row], expected.to(dtype))
        others = torch.arange(num_rows) != row
        assert torch.equal(out[others], whole[others])
        case.x = before


def test_memory_may_be_strided_and_nothing_beside_it_is_touched() -> None:
    case = Case(37, 50, 9)
    room = torch.full((9, 80), -7.0)
    wide = torch.full((9, 64), float("nan"))
    wide[:, 3:53] = case.x
    int8_linear(room[:, 11:48], wide[:, 3:53], case.packed, case.scale, case.bias)
    assert torch.equal(room[:, 11:48], case.run())
    assert (room[:, :11] == -7).all() and (room[:, 48:] == -7).all()


def test_no_rows_are_no_work() -> None:
    assert Case(37, 50, 0).run().shape == (0, 37)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_packing_can_be_undone_and_fills_up_with_zeros(size: tuple[int, int]) -> None:
    num_out, num_in = size
    quantized = Case(*size, num_rows=1).quantized
    packed = pack_int8(quantized)
    assert packed.is_contiguous() and packed.shape[2:] == (8, 16, 4)
    assert torch.equal(unpack_int8(packed, num_out, num_in), quantized)
    o, i = num_out - 1, num_in - 1
    # Of eight inputs the first quad has 0, 2, 4 and 6.
    place = o // 16, i // 32, i % 32 // 8 * 2 + i % 2, o % 16, i % 8 // 2
    assert int(packed[place]) == int(quantized[o, i]) + 128
    whole = unpack_int8(packed, packed.shape[0] * 16, packed.shape[1] * 32)
    assert not whole[num_out:].any() and not whole[:, num_in:].any()


def test_weights_are_rounded_to_the_nearest_step_of_their_channel() -> None:
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 50)[:, None]
    weight[7], weight[8, 0] = 0, 1e-42  # no step is too small to be told from zero, and none is infinite
    quantized, scale = quantize_int8(weight)
    assert torch.equal(quantized.abs().amax(1), torch.tensor([0 if i == 7 else 127 for i in range(50)]))
    error = (weight.double() - quantized.double() * scale.double()[:, None]).abs()
    assert (error <= 0.5001 * scale.double()[:, None]).all()


def test_what_does_not_fit_is_refused() -> None:
    case = Case(37, 50, 4)
    out, x = torch.empty(4, 37), case.x
    for arguments, why in (
        ((out, x[:, :30], case.packed, case.scale), r"weight .* is not packed for 37 x 30"),
        ((out, x, case.packed.view(torch.int8), case.scale), r"weight .* is not packed"),
        ((out, x, case.packed, case.scale[:36]), r"out .* does not fit 36 outputs"),
        ((out[:3], x, case.packed, case.scale), r"out .* does not fit 37 outputs"),
        ((out, x, case.packed, case.scale.double()), r"scale .* is not float32 for 37 outputs"),
        ((out, x, case.packed, case.scale, case.bias[:5]), r"bias .* is not float32 for 37 outputs"),
    ):
        with pytest.raises(ValueError, match=why):
            int8_linear(*arguments)
