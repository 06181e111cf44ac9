"""Products with quantised weights: those of the dequantised weight, bit for bit, in any company and at every level."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels import cpu
from kernels.cpu.library import TilesError, at_level
from kernels.cpu.native.build import EMULATED, WITH_PAIRS, usable_levels
from kernels.cpu.products.layer_product import Product
from kernels.cpu.products.quantized_records import find_factors, pack_quantized
from kernels.oracles import reference
from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight
from tests.kernels.cpu_products import matmul
from tests.kernels.few_bits_weights import pack_float32
from tests.kernels.quantized_weights import FORMATS, OF_FACTORS, awq, gptq, int8_per_output, q4_k, q6_k

ALL = FORMATS | OF_FACTORS
OF_INTEGERS = [name for name in ALL if not name.startswith("e")]  # not e4m3 or e2m1
OF_PAIRS = [level for level in (EMULATED, WITH_PAIRS, "amx") if level in usable_levels()]
WITHOUT_PAIRS = next(level for level in reversed(usable_levels()) if level not in OF_PAIRS)
# out x in: a whole panel, less and more than one, and groups of which the last is short, where a format has such.
SIZES = [(48, 256), (61, 768), (101, 1184)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight_of(name: str, out_features: int, in_features: int) -> QuantizedWeight:
    if name in OF_FACTORS:
        in_features = in_features // 256 * 256
    return ALL[name][0](out_features, in_features, random(out_features))


def product_of(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> Product:
    found = cpu.quantized_product(weight, bias)
    assert found is not None
    return found


def run(product: Product, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((x.shape[0], product.out_features), float("nan"), dtype=x.dtype)
    product.multiply(out, x)
    return out


def of_floats(weight: QuantizedWeight, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The product with the dequantised weight, whose sums run over the columns as the quantised weight has them."""
    order = torch.arange(weight.in_features) if weight.order is None else weight.order
    packed = pack_float32(weight.dequantized()[:, order])
    out = torch.full((x.shape[0], weight.out_features), float("nan"), dtype=x.dtype)
    matmul(out, x[:, order].contiguous(), packed, bias)
    return out


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_products_have_the_bits_of_those_with_the_dequantised_weight(name: str, size: tuple[int, int]) -> None:
    weight = weight_of(name, *size)
    bias = torch.randn(size[0], generator=random(1))
    product = product_of(weight, bias)
    x = torch.randn(67, weight.in_features + 5, generator=random(2))[:, 5:]
    for num_threads, rows in ((1, 67), (2, 67), *((1, rows) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17))):
        torch.set_num_threads(num_threads)
        assert torch.equal(run(product, x[:rows]), of_floats(weight, bias, x[:rows])), rows
    if "KERNELS_CPU_LIBRARY" in os.environ:  # as `make sanitize` names one: no level is another then
        return
    rounded = x[:9].bfloat16()
    with at_level(WITHOUT_PAIRS):
        assert torch.equal(run(product, rounded), of_floats(weight, bias, rounded))
        assert torch.equal(run(product, rounded[8:]), run(product, rounded)[8:])


@pytest.fixture(params=OF_PAIRS)  # without AVX2 there are none, and pytest says so
def level_of_pairs(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        with at_level(request.param):
            yield request.param
    except TilesError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_rows_of_bfloat16_meet_the_weight_itself_by_pairs(
    name: str, size: tuple[int, int], level_of_pairs: str
) -> None:
    weight = weight_of(name, *size)
    bias, product = torch.randn(size[0], generator=random(1)), product_of(weight)
    with_bias = product_of(weight, bias)
    some = slice(None, None, 5 if level_of_pairs == EMULATED else 1)  # of inputs: what is emulated takes long
    each_input = torch.eye(weight.in_features, dtype=torch.bfloat16)[some]
    x = torch.randn(67, weight.in_features + 5, generator=random(2)).bfloat16()[:, 5:]
    assert torch.equal(run(product, each_input), weight.dequantized().bfloat16().T[some])
    found = run(with_bias, x)
    for num_threads, first, end in ((2, 0, 67), (1, 66, 67), *((1, 0, rows) for rows in range(1, 18))):
        torch.set_num_threads(num_threads)
        assert torch.equal(run(with_bias, x[first:end]), found[first:end]), (first, end)
    if level_of_pairs == "amx":
        with at_level(EMULATED):
            assert torch.equal(run(with_bias, x), found)
    exact = x.double() @ weight.dequantized().double().T + bias.double()
    # A sum over a group has a rounding for each of up to 32 inputs, that over groups two for each; bfloat16 has one.
    num_roundings = 32 + 2 * -(-weight.in_features // 16)
    order = slice(None) if weight.order is None else weight.order
    magnitudes = x[:, order].double().abs() @ parts_of(weight).T
    bound = (num_roundings + 1) * 2.0**-24 * (magnitudes + bias.double().abs()) + 2.0**-8 * exact.abs()
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", ["awq", "q8_0", "e4m3 in blocks"])
def test_rows_of_bfloat16_next_to_nothing_have_the_same_bits_alone(name: str, level_of_pairs: str) -> None:
    """Instructions for pairs of bfloat16 take denormal numbers, below 2^-126, for zeros."""
    product = product_of(weight_of(name, 48, 256))
    x = (torch.randn(16, 256, generator=random(2)) * torch.logspace(-133, -110, 16, 2.0)[:, None]).bfloat16()
    found = run(product, x)
    for row in range(16):
        assert torch.equal(run(product, x[row : row + 1]), found[row : row + 1]), row
    assert found[-1].isfinite().all() and found[-1].any()


@pytest.mark.parametrize("name", ALL)
def test_products_are_those_of_float64(name: str) -> None:
    weight = weight_of(name, 61, 512)
    x = torch.randn(11, 512, generator=random(2))
    exact = weight.dequantized().double()
    # A float32 sum of n products is off by up to n roundings of the sums of magnitudes; here far fewer.
    magnitudes = x.double().abs() @ exact.abs().T + 1e-30
    assert ((run(product_of(weight), x) - x.double() @ exact.T).abs() / magnitudes).max() < 2e-6


@pytest.mark.parametrize("level", usable_levels()[:-1])
@pytest.mark.parametrize("name", ALL)
def test_every_level_of_instructions_gives_the_same_bits(name: str, level: str) -> None:
    weight = weight_of(name, 50, 288)
    product, x = product_of(weight), torch.randn(13, weight.in_features, generator=random(2))
    expected = [run(product, x[:rows]) for rows in (1, 2, 13)]
    with at_level(level):
        for rows, one in zip((1, 2, 13), expected, strict=True):
            assert torch.equal(run(product, x[:rows]), one), rows


@pytest.mark.parametrize("name", ALL)
def test_weights_take_no_more_than_their_bits(name: str) -> None:
    weight = weight_of(name, 96, 256)
    beside = 0 if weight.order is None else weight.order.nbytes
    assert (product_of(weight).weight_bytes - beside) * 8 / (96 * 256) == ALL[name][1]


def rounded(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, inputs=Inputs.INT8)


def parts_of(weight: QuantizedWeight) -> torch.Tensor:
    """f64[out, in], magnitudes: a code by its scale, and the offset, which may be of another sign."""
    offset = torch.zeros_like(weight.scale) if weight.offset is None else weight.offset
    if weight.zero is not None:
        offset = weight.scale * weight.zero
    by_column = [
        of.abs().repeat_interleave(weight.group, dim=1)[:, : weight.in_features] for of in (weight.scale, offset)
    ]
    return (weight.values().abs() * by_column[0] + by_column[1]).double()


def most_error(weight: QuantizedWeight, bias: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Of float32 sums of pieces of 16 inputs, each of which is exact: it is rounded when it is multiplied by its scale
    and when it is added, and so is its offset; each time by 2^-24 of at most the sum of all magnitudes."""
    pieces = -(-weight.in_features // 16)
    return (4 * pieces + 2) * 2.0**-24 * (rows.abs() @ parts_of(weight).T + bias.double().abs())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_rows_of_eight_bits_are_rounded_by_groups_and_multiplied_by_the_weight_itself(
    name: str, size: tuple[int, int]
) -> None:
    weight = rounded(weight_of(name, *size))
    depth, bias = weight.in_features, torch.randn(size[0], generator=random(1))
    x = torch.randn(21, depth, generator=random(2)) * torch.logspace(-3, 3, 21)[:, None]
    order = torch.arange(depth) if weight.order is None else weight.order
    rows = reference.rounded_rows(x[:, order])
    exact = rows @ weight.dequantized()[:, order].double().T + bias.double()
    found = run(product := product_of(weight, bias), x)
    assert ((found.double() - exact).abs() <= most_error(weight, bias, rows)).all()
    for num_threads, count in ((2, 21), *((1, count) for count in range(1, 21))):
        torch.set_num_threads(num_threads)
        assert torch.equal(run(product, x[:count]), found[:count]), count
    assert torch.equal(run(product, x[20:]), found[20:])
    of_bfloat16 = x.bfloat16()
    assert torch.equal(run(product, of_bfloat16), run(product, of_bfloat16.float()).bfloat16())


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_the_largest_sums_of_rounded_rows_are_exact(name: str) -> None:
    """All codes the largest or the smallest, all numbers of a row as large: partial sums that do not fit would wrap."""
    weight, bias = rounded(weight_of(name, 48, 256)), torch.zeros(48)
    values, codes = weight.values(), weight.codes.flatten()
    x = torch.ones(18, weight.in_features)
    x[1], x[2, ::2], x[3, ::4] = -1, -1, -1
    rows = reference.rounded_rows(x)
    for one in (values.argmax(), values.argmin()):
        weight = replace(weight, codes=torch.full_like(weight.codes, int(codes[one])))
        exact = rows @ weight.dequantized().double().T  # an order of inputs changes nothing, as all columns are alike
        for count in (1, 2, 4, 18):
            error = (run(product_of(weight, bias), x[:count]).double() - exact[:count]).abs()
            assert (error <= most_error(weight, bias, rows[:count])).all(), (int(one), count)


@pytest.mark.parametrize("level", usable_levels()[:-1])
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_every_level_gives_rounded_rows_the_same_bits(name: str, level: str) -> None:
    weight = rounded(weight_of(name, 50, 288))
    product, x = product_of(weight), torch.randn(21, weight.in_features, generator=random(2))
    expected = [run(product, x[:rows]) for rows in (1, 2, 4, 13, 21)]
    with at_level(level):
        for rows, one in zip((1, 2, 4, 13, 21), expected, strict=True):
            assert torch.equal(run(product, x[:rows]), one), rows


def test_rounded_rows_are_multiplied_by_integers_alone() -> None:
    for name in ALL:
        product = cpu.quantized_product(rounded(weight_of(name, 96, 256)), None)
        assert (product is not None) == (name in OF_INTEGERS), name


@pytest.mark.parametrize(
    ("name", "bits"), {"q4_k": 4.625, "q5_1": 7, "q5_k": 6.625, "q6_k": 6.5625, "q8_0": 8.5}.items()
)
def test_codes_of_five_and_six_bits_take_six_where_rows_are_rounded(name: str, bits: float) -> None:
    product = product_of(rounded(weight_of(name, 96, 256)))
    assert product.weight_bytes * 8 / (96 * 256) == bits


@pytest.mark.parametrize("rows_are", [Inputs.AS_THEY_ARE, Inputs.INT8])
def test_products_side_by_side_are_one_with_the_bits_of_each(rows_are: Inputs) -> None:
    """Outputs that fill no panel, formats of unlike records, one with a bias and one whose rows come in an order."""
    weights = [replace(weight_of(name, count, 512), inputs=rows_are) for name, count in (("q4_k", 61), ("q6_k", 48))]
    weights.append(replace(weight_of("q8_0", 7, 512), inputs=rows_are))
    bias = torch.randn(48, generator=random(1))
    products = [product_of(weight, bias if weight.out_features == 48 else None) for weight in weights]
    joined = Product.side_by_side(products)
    assert joined is not None and (joined.out_features, joined.in_features) == (116, 512)
    assert joined.weight_bytes == sum(product.weight_bytes for product in products)
    x = torch.randn(150, 512, generator=random(2))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for count in (1, 5, 150):
            expected = torch.cat([run(product, x[:count]) for product in products], dim=1)
            assert torch.equal(run(joined, x[:count]), expected)
            assert torch.equal(
                run(joined, x[:count].bfloat16()),
                torch.cat([run(product, x[:count].bfloat16()) for product in products], dim=1),
            )
    ordered = product_of(replace(weights[0], order=torch.randperm(512, generator=random())))
    other_rows = Inputs.INT8 if rows_are is Inputs.AS_THEY_ARE else Inputs.AS_THEY_ARE
    for other in (ordered, product_of(replace(weights[0], inputs=other_rows)), product_of(weight_of("q8_0", 7, 256))):
        assert Product.side_by_side([products[0], other]) is None
    alike = Product.side_by_side([ordered, ordered])
    assert alike is not None and torch.equal(run(alike, x), run(ordered, x).repeat(1, 2))


def test_integers_of_eight_bits_by_rounded_rows_are_the_product_of_int8() -> None:
    weight = replace(int8_per_output(61, 100, random()), inputs=Inputs.INT8)
    x = torch.randn(9, 100, generator=random(2))
    exact = reference.rounded_rows(x) @ weight.dequantized().double().T
    found = run(product_of(weight), x)
    assert ((found.double() - exact).abs() <= 2e-6 * exact.abs().amax(dim=1, keepdim=True)).all()


@pytest.mark.parametrize(
    ("name", "inputs"),
    [(name, Inputs.AS_THEY_ARE) for name in ALL] + [(name, Inputs.INT8) for name in ("awq", "q6_k", "q8_0")],
)
def test_nothing_beside_a_row_is_read_or_written_and_nan_stays_in_it(name: str, inputs: Inputs) -> None:
    weight = replace(weight_of(name, 53, 288), inputs=inputs)
    product, depth = product_of(weight), weight.in_features
    for rows in (1, 7, 20):
        wide, out = torch.full((rows, depth + 9), float("nan")), torch.full((rows, 80), -7.0)
        wide[:, 3 : depth + 3] = torch.randn(rows, depth, generator=random(2))
        product.multiply(out[:, 11:64], wide[:, 3 : depth + 3])
        assert torch.equal(out[:, 11:64], run(product, wide[:, 3 : depth + 3].contiguous()))
        assert (out[:, :11] == -7).all() and (out[:, 64:] == -7).all()
        wide[rows // 2, depth] = float("nan")
        spoilt = run(product, wide[:, 3 : depth + 3])
        rest = torch.arange(rows) != rows // 2
        assert spoilt[rows // 2].isnan().all() and torch.equal(spoilt[rest], out[rest, 11:64])


def test_factors_are_found_whatever_the_largest_of_them_is() -> None:
    for largest in (*range(1, 128), -1, -77, -128):
        times = torch.randint(-abs(largest) + (largest == -128), abs(largest), (7, 16), generator=random())
        times[:, 3] = largest
        base = torch.randn(7, 1, generator=random(1)).half().float()
        numbers = times * base
        found = find_factors(numbers, 16)
        assert found is not None and torch.equal(found[0].float() * found[1].float(), numbers), largest
    numbers[3, 5] *= 1 + 2**-20
    assert find_factors(numbers, 16) is None
    nothing = torch.zeros(2, 16)
    found = find_factors(nothing, 8)
    assert found is not None and not found[0].any() and not found[1].any()
    nothing[1, 9] = float("nan")
    assert find_factors(nothing, 8) is None


@pytest.mark.parametrize("make", [q4_k, q6_k])
def test_scales_that_are_no_factors_are_kept_as_they_are_or_not_at_all(make: type) -> None:
    weight = make(50, 512, random())
    weight.scale[3, 5] *= 1 + 2**-20
    found = pack_quantized(weight)
    if weight.offset is not None:  # what is added to it would have to be an exact product
        assert found is None
    else:
        assert found is not None and found.packed.numel() * 8 / (96 * 512) == 10
        x = torch.randn(3, 512, generator=random(2))
        assert torch.equal(run(product_of(weight), x), of_floats(weight, None, x))


@pytest.mark.parametrize("inputs", [Inputs.AS_THEY_ARE, Inputs.INT8])
@pytest.mark.parametrize("zero", [-8, 0, 7, 8, 9])
@pytest.mark.parametrize(
    ("numbers", "least", "most"), [(Numbers.UINT4, 0, 15), (Numbers.INT6, -32, 31), (Numbers.INT8, -128, 127)]
)
def test_a_zero_that_all_groups_have(numbers: Numbers, least: int, most: int, zero: int, inputs: Inputs) -> None:
    """As of a whole tensor, or of a symmetric format; some zeros make other records than many."""
    codes = torch.randint(least, most + 1, (61, 96), generator=random(), dtype=torch.int16)
    of_groups = torch.full((61, 3), zero, dtype=torch.int16)
    scale = torch.rand(61, 3, generator=random(1)).half().float()
    weight = QuantizedWeight(numbers, codes.to(torch.uint8), scale, 32, of_groups, inputs=inputs)
    x = torch.randn(9, 96, generator=random(2))
    found = run(product_of(weight), x).double()
    exact = (reference.rounded_rows(x) if inputs is Inputs.INT8 else x.double()) @ weight.dequantized().double().T
    assert ((found - exact).abs() <= 2e-6 * exact.abs().amax(dim=1, keepdim=True)).all()


def test_what_no_record_says_is_left_to_others() -> None:
    four, eight = awq(50, 256, random()), int8_per_output(50, 256, random())
    nan = replace(eight, numbers=Numbers.E4M3, codes=torch.full_like(eight.codes, 0x7F))
    for weight in (
        awq(50, 272, random(), group=16),
        awq(50, 250, random()),
        replace(four, zero=torch.full_like(four.scale, 300).short()),
        replace(four, scale=four.scale * (1 + 2**-20)),
        replace(eight, zero=torch.ones(50, 1, dtype=torch.int16)),  # its scales need all bits of float32
        replace(eight, scale=eight.scale.half().float(), offset=eight.scale.half().float()),
        replace(eight, scale=eight.scale * float("inf")),
        replace(four, numbers=Numbers.E2M1, zero=None, scale=torch.full_like(four.scale, 2.0**-149)),  # half is nothing
        nan,
    ):
        assert cpu.quantized_product(weight, None) is None


def test_orders_that_do_not_fit_are_refused() -> None:
    weight = gptq(50, 64, random())
    for order in (torch.arange(63), torch.zeros(64, dtype=torch.int64), torch.arange(1, 65)):
        with pytest.raises(ValueError, match="order "):
            cpu.quantized_product(replace(weight, order=order), None)
