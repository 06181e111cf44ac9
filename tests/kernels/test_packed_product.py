"""Products with packed codes: right for each format, and a row the same in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.bench import operations
from kernels.gpu.operations import quantized_product
from kernels.gpu.quantized import expanded_weight as module_of_expanded
from kernels.gpu.quantized import packed_linear, segments
from kernels.gpu.quantized import packed_product as module
from kernels.gpu.quantized.expanded_weight import expanded_weight, expanding_rows
from kernels.gpu.quantized.factored_scales import factored
from kernels.gpu.quantized.packed_codes import pack_codes
from kernels.quantized_weight import Numbers, QuantizedWeight
from tests.kernels.device import DEVICE
from tests.kernels.quantized_formats import FORMATS, Format, exact_weight
from tests.kernels.rows import DTYPES, gaps_are_untouched, normal, poisoned, strided

by_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
# Of rows past the last there are no sums of groups: what comes of them is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
# Of a result: one rounding. Numbers and their products are exact; of the rest, sums in float32, see below.
LEAST = 2**-25  # the half of float16's smallest number
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def bound(x: torch.Tensor, weight: QuantizedWeight, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the error: a product passes 16 sums in a tensor core's tile, one a field, one a chunk or group, one a segment,
    a scale and a bias, each of which rounds to float32; then the result is rounded to its type."""
    depth = 16 + 8 + weight.in_features / 16 + 8 + 2
    of_numbers = replace(weight, zero=None, offset=None, scale=weight.scale.abs())
    sizes = x.double().abs() @ exact_weight(of_numbers).abs().T
    if weight.zero is not None:  # a number less its zero is at most 16
        sizes += 16 * x.double().abs().sum(1, keepdim=True) * weight.scale.double().amax(1)
    if weight.offset is not None:
        sizes += x.double().abs().sum(1, keepdim=True) * weight.offset.double().abs().amax(1)
    return depth * 2**-24 * sizes + ROUNDING[dtype] * (exact.abs() + depth * 2**-24 * sizes)


@DTYPES
@by_format
@pytest.mark.parametrize(("count", "num_outputs", "size"), [(1, 37, 300), (67, 70, 520)])
def test_products(form: Format, dtype: torch.dtype, count: int, num_outputs: int, size: int) -> None:
    """Few rows and many, outputs and inputs that no tile divides."""
    weight = form.weight(num_outputs, size)
    x, out = strided(normal(count, size, dtype=dtype)), poisoned(count, num_outputs, dtype=dtype)
    bias = normal(num_outputs, dtype=dtype, seed=2) if count > 1 else None
    product = quantized_product(weight, bias)
    assert product is not None
    assert (product.out_features, product.in_features) == (num_outputs, size)
    product.multiply(out, x)
    exact = torch.nn.functional.linear(x.double(), exact_weight(weight), None if bias is None else bias.double())
    assert bool(((out.double() - exact).abs() <= bound(x, weight, exact, dtype)).all())
    assert gaps_are_untouched(out)


@by_format
def test_a_row_is_the_same_in_any_company(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, among few, in each tile of rows, its sum split between programs and not.

    numpy, which multiplies for the interpreter, sums in an order of its own: numbers are such that
    its sums are exact. What is scaled and added up over chunks and segments is not.
    """
    monkeypatch.setattr(segments, "WANTED_PROGRAMS", 3)  # for which as many tiles need not be interpreted
    size, dtype = 1030, torch.float16
    weight = form.weight(33, size)
    if form.numbers is Numbers.E4M3:
        codes = weight.codes | 0x20  # of 1/8 at least
        weight = replace(weight, codes=torch.where(codes & 0x7F == 0x7F, codes - 1, codes))
    product = quantized_product(weight, None)
    assert product is not None
    launches: list[bool] = []
    bind = module._bound

    def watched(*arguments: Any) -> Any:
        cut, launch = bind(*arguments)
        launches.append(cut.is_split)
        return cut, launch

    monkeypatch.setattr(module, "_bound", watched)
    x = (normal(130, size).clamp(-2, 2) * 4).round().div(4).to(dtype)
    whole = torch.empty(130, 33, dtype=dtype, device=DEVICE)
    product.multiply(whole, x)
    parts = [slice(64, 65), slice(127, 130), slice(20, 90)]
    for rows in parts:
        few = torch.empty_like(whole[rows])
        product.multiply(few, x[rows])
        assert torch.equal(few, whole[rows])
    assert launches == [False] + [True] * len(parts)


@DTYPES
@by_format
def test_a_weight_is_expanded_for_many_rows(form: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to the rows' type and nothing else; sizes that no tile divides."""
    monkeypatch.setattr(packed_linear, "expanding_rows", lambda device: 20)
    weight, bias = form.weight(70, 300), normal(70, dtype=dtype, seed=2)
    packed = pack_codes(weight)
    assert packed is not None
    exact, expanded = exact_weight(replace(weight, order=None)), expanded_weight(packed, dtype)
    parts = exact.abs()
    if weight.offset is not None:  # the sum's, whose terms may cancel each other
        parts = parts + 2 * weight.offset.double().abs().repeat_interleave(weight.group, dim=1)[:, :300]
    assert bool(((expanded.double() - exact).abs() <= 3 * 2**-24 * parts + ROUNDING[dtype] * exact.abs() + LEAST).all())

    products = [quantized_product(weight, bias, may_expand=may_expand) for may_expand in (True, False)]
    x, outs = normal(20, 300, dtype=dtype), [poisoned(20, 70, dtype=dtype) for _ in products]
    monkeypatch.setattr(module_of_expanded, "MOST_BYTES", 64 * 300 * dtype.itemsize)  # 64 outputs, and then 6
    for product, out in zip(products, outs, strict=True):
        assert product is not None
        product.multiply(out, x)
    rows = x if weight.order is None else x[:, weight.order]
    wide = torch.addmm(bias.double(), rows.double(), expanded.double().t())
    of_sums = 302 * 2**-24 * (rows.double().abs() @ expanded.double().abs().t() + bias.double().abs())
    assert bool(((outs[0].double() - wide).abs() <= of_sums + ROUNDING[dtype] * wide.abs()).all())
    # Beside the other product, which rounds no weight.
    cost = ROUNDING[dtype] * (rows.double().abs() @ exact.abs().t() + wide.abs()) + 2 * of_sums
    assert bool(((outs[0] - outs[1]).double().abs() <= 2 * cost).all()) and all(map(gaps_are_untouched, outs))


@pytest.mark.parametrize(
    ("capability", "rows"), [(80, 192), (86, 640), (89, 640), (90, 128), (100, 128), (103, 128), (110, 640), (120, 640)]
)
def test_cards_of_one_generation_expand_from_the_same_rows_on(
    capability: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of_expanded, "capability_of", lambda device: capability)
    assert expanding_rows(torch.device("cuda")) == rows


@pytest.mark.parametrize(
    ("capability", "dtype", "num_warps"), [(100, torch.float32, 16), (100, torch.float16, 4), (90, torch.float32, 4)]
)
def test_float32_rows_have_warps_with_which_they_are_not_rounded(
    capability: int, dtype: torch.dtype, num_warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is launched; see `warps_of`."""
    given: list[Any] = []
    monkeypatch.setattr(module, "capability_of", lambda device: capability)
    monkeypatch.setattr(module, "Launch", lambda *arguments, **constants: given.append(constants["num_warps"]))
    weight = pack_codes(FORMATS[0].weight(33, 64))
    assert weight is not None
    x, out = (torch.zeros(3, size, dtype=dtype, device=DEVICE) for size in (64, 33))
    bind: Any = module._bound
    bind.__wrapped__(out, x, *weight.tensors, None, 33, 64, weight.numbers, weight.group)
    assert given == [num_warps]


def test_segments_cover_the_chunks() -> None:
    for num_outputs in (1, 130, 576, 4096, 28672, 128256):
        for num_chunks in (1, 3, 8, 32, 112, 231):
            segment = segments.chunks_of_segment(num_outputs, num_chunks)
            count = -(-num_chunks // segment)
            assert count <= 8 and (count == 1 or segment >= 4)


def test_codes_lie_where_the_layout_says() -> None:
    """Field f of word i in chunk c of output n is input c * chunk + 16 f + i."""
    for form in FORMATS:
        weight = form.weight(5, 300)
        packed = pack_codes(weight)
        assert packed is not None
        bits = 32 // (packed.chunk // 16)
        codes = {Numbers.INT8: weight.codes ^ 0x80, Numbers.INT6: weight.codes + 32}.get(form.numbers, weight.codes)
        for output, k in ((0, 0), (4, 17), (3, 129), (2, 299)):
            chunk, field, word = k // packed.chunk, k % packed.chunk // 16, k % 16
            code = int(packed.words[chunk, output, word]) >> (bits * field) & (2**bits - 1)
            if packed.high is not None:
                code |= (int(packed.high[chunk, output, word]) >> (2 * field) & 3) << 4
            assert code == int(codes[output, k])


def test_weights_that_have_no_such_layout_are_left_to_others() -> None:
    zeros = torch.zeros(3, 2, dtype=torch.int16, device=DEVICE)
    assert quantized_product(Format("", Numbers.UINT4, 48).weight(3, 96), None) is None
    assert quantized_product(Format("", Numbers.UINT4, 8).weight(3, 96), None) is None
    assert quantized_product(replace(Format("", Numbers.E4M3, 64).weight(3, 96), zero=zeros), None) is None
    assert quantized_product(Format("", Numbers.UINT4, 0, "offset").weight(3, 96), None) is None
    # A chunk has 128 codes of four bits, and each adds the offsets of its groups.
    assert quantized_product(Format("", Numbers.UINT4, 256, "offset").weight(3, 512), None) is None
    assert quantized_product(Format("", Numbers.UINT4, 128, "offset").weight(3, 512), None) is not None


def test_no_row_is_nothing_and_what_does_not_fit_is_refused() -> None:
    weight = FORMATS[0].weight(5, 40)
    product, x, out = quantized_product(weight, None), normal(3, 40), normal(3, 5)
    assert product is not None
    product.multiply(out[:0], x[:0])
    with pytest.raises(ValueError, match=r"\(2, 5\) torch.float32 with a weight \(5, 40\)"):
        product.multiply(out[:2], x)
    with pytest.raises(ValueError, match=r"packed_product: \(3, 30\)"):
        product.multiply(out, x[:, :30])
    with pytest.raises(ValueError, match=r"to \(3, 5\) torch.float16"):
        product.multiply(out.half(), x)
    with pytest.raises(ValueError, match=r"bias must be contiguous \(5,\)"):
        wrong = quantized_product(weight, normal(4))
        assert wrong is not None
        wrong.multiply(out, x)


def test_scales_that_are_integers_times_one_number_take_a_byte_each() -> None:
    """To the last bit; others stay as they are."""
    form = next(form for form in FORMATS if form.name == "Q4_K")
    weight = form.weight(5, 1100)
    weight.scale[1, 8:16] = 0
    found = factored(weight.scale, 4)
    assert found is not None and weight.offset is not None
    numbers, factor = found
    assert numbers.dtype == torch.int8 and factor.shape == (5, 9)
    assert torch.equal(numbers * factor.repeat_interleave(4, dim=1)[:, :35], weight.scale)
    packed = pack_codes(weight)
    assert packed is not None and packed.scale.dtype == torch.int8 and packed.offset_factor is not None
    weight.scale[0, 0] = torch.nextafter(weight.scale[0, 1] / 3, weight.scale.new_tensor(9.0))
    assert factored(weight.scale, 4) is None


def test_variants_in_a_folder_of_their_own_are_found() -> None:
    found = operations.variants()
    assert {"packed_product", "rounded_product", "rounded_rows", "grouped_product", "group_sums"} <= found.keys()
