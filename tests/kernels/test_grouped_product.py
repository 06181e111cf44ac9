"""The products of a mixture of experts of few bits: each row with its expert's weight, whatever the experts' shares."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kernels.gpu.operations import grouped_matmul, grouped_quantized_matmul
from kernels.gpu.quantized import expanded_weight as module_of_expanded
from kernels.gpu.quantized import grouped_product
from kernels.gpu.quantized.expanded_weight import expanded_weight
from kernels.gpu.quantized.packed_codes import PackedCodes, pack_codes, stacked
from kernels.gpu.quantized.segments import block_m_of
from kernels.oracles import reference
from kernels.quantized_weight import QuantizedWeight
from tests.kernels.device import DEVICE
from tests.kernels.quantized_formats import FORMATS, Format, exact_weight
from tests.kernels.rows import DTYPES, gaps_are_untouched, normal, poisoned, strided
from tests.kernels.test_packed_product import bound

BY_NAME = {form.name: form for form in FORMATS}
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def experts(form: Format, count: int, num_outputs: int, size: int) -> tuple[PackedCodes, list[QuantizedWeight]]:
    """Packed, and one by one."""
    weights = [form.weight(num_outputs, size, seed) for seed in range(count)]
    packed = [pack_codes(weight) for weight in weights]
    return stacked([one for one in packed if one is not None]), weights


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)


@DTYPES
@pytest.mark.parametrize("name", ["AWQ", "Q4_K", "Q6_K", "fp8 blocks", "MXFP4"])
@pytest.mark.parametrize(("counts", "has_rows"), [([3, 0, 70, 1], True), ([0, 2, 0, 0], False)])
def test_products(name: str, dtype: torch.dtype, counts: list[int], has_rows: bool) -> None:
    """Tiles of 32 rows and of 16, experts without rows, outputs and inputs that no tile divides, with a bias or not."""
    num_rows, num_outputs, size = sum(counts), 70, 300
    num_tokens = num_rows // 3 + 1 if has_rows else num_rows
    packed, weights = experts(BY_NAME[name], len(counts), num_outputs, size)
    x = strided(normal(num_tokens, size, dtype=dtype))
    rows = (torch.arange(num_rows, device=DEVICE) * 7) % num_tokens if has_rows else None
    out = poisoned(num_rows, num_outputs, dtype=dtype)
    exact = torch.empty(num_rows, num_outputs, dtype=torch.float64, device=DEVICE)
    bias = normal(len(counts), num_outputs, dtype=dtype, seed=2) if has_rows else None
    grouped_quantized_matmul(out, x, packed, starts_of(counts), rows, bias)
    exact_weights = torch.stack([exact_weight(weight) for weight in weights])
    exact_bias = None if bias is None else bias.double()
    reference.grouped_matmul(exact, x.double(), exact_weights, starts_of(counts), rows, exact_bias)
    of_rows = (x if rows is None else x[rows]).split(counts)
    bounds = [bound(*each, dtype) for each in zip(of_rows, weights, exact.split(counts), strict=True)]
    assert bool(((out.double() - exact).abs() <= torch.cat(bounds)).all())
    assert gaps_are_untouched(out)


def test_a_row_is_the_same_in_any_company() -> None:
    """In tiles of 16 rows and of 64; numbers are such that numpy's sums, whose order is its own, are exact."""
    packed, _ = experts(BY_NAME["AWQ"], 2, 40, 520)
    x = (normal(150, 520).clamp(-2, 2) * 4).round().div(4).half()
    alone = torch.empty(1, 40, dtype=torch.float16, device=DEVICE)
    grouped_quantized_matmul(alone, x, packed, starts_of([0, 1]), torch.tensor([5], device=DEVICE))
    for counts, place in (([40, 110], 41), ([0, 150], 149)):
        rows = torch.arange(150, device=DEVICE).roll(place - 5)
        out = torch.empty(150, 40, dtype=torch.float16, device=DEVICE)
        grouped_quantized_matmul(out, x, packed, starts_of(counts), rows)
        assert torch.equal(out[place], alone[0])


def test_tiles_follow_from_all_experts_where_others_are_elsewhere() -> None:
    """Of 40 rows for 8 experts two are here: 5 rows an expert, whatever has room."""
    packed, _ = experts(BY_NAME["AWQ"], 2, 5, 40)
    with mock.patch.object(grouped_product, "block_m_of", wraps=block_m_of) as chosen:
        grouped_quantized_matmul(normal(40, 5), normal(40, 40), packed, starts_of([4, 6]), of_experts=8)
        grouped_quantized_matmul(normal(40, 5), normal(40, 40), packed, starts_of([18, 22]))
    assert chosen.call_args_list == [mock.call(5), mock.call(20)]


def test_no_row_is_nothing_and_what_does_not_fit_is_refused() -> None:
    packed, _ = experts(BY_NAME["AWQ"], 2, 5, 40)
    x, out, starts = normal(4, 40), normal(4, 5), starts_of([1, 3])
    grouped_quantized_matmul(out[:0], x[:0], packed, starts_of([0, 0]))
    with pytest.raises(ValueError, match=r"\(4, 40\) to \(3, 5\) with weights \(5, 40\)"):
        grouped_quantized_matmul(out[:3], x, packed, starts)
    with pytest.raises(ValueError, match=r"starts must be contiguous \(3,\)"):
        grouped_quantized_matmul(out, x, packed, starts[:2])
    with pytest.raises(ValueError, match=r"bias must be contiguous \(2, 5\)"):
        grouped_quantized_matmul(out, x, packed, starts, bias=normal(2, 4))
    with pytest.raises(ValueError, match="starts must be int32, rows int64"):
        grouped_quantized_matmul(out, x, packed, starts.long())


@pytest.mark.parametrize(("name", "at_once"), [("AWQ", 1), ("Q4_K", 2), ("Q6_K", 4), ("MXFP4", 4)])
def test_experts_of_many_rows_are_expanded(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once or some; what is computed is the product with each expanded."""
    monkeypatch.setattr(grouped_product, "expanding_rows", lambda device: 5)
    monkeypatch.setattr(module_of_expanded, "MOST_BYTES", at_once * 70 * 300 * 2 + 1)
    packed, weights = experts(BY_NAME[name], 4, 70, 300)
    counts, dtype = [3, 0, 36, 1], torch.float16
    x, bias = normal(20, 300, dtype=dtype), normal(4, 70, dtype=dtype, seed=2)
    rows, out = (torch.arange(40, device=DEVICE) * 7) % 20, poisoned(40, 70, dtype=dtype)
    with mock.patch.object(grouped_product, "grouped_matmul", wraps=grouped_matmul) as multiply:
        grouped_quantized_matmul(out, x, packed, starts_of(counts), rows, bias, may_expand=True)
    assert multiply.call_count == -(-4 // at_once) and gaps_are_untouched(out)
    for expert, part in enumerate(out.split(counts)):
        of_expert = rows.split(counts)[expert]
        one = pack_codes(weights[expert])
        assert one is not None
        expanded = expanded_weight(one, dtype)
        exact = torch.addmm(bias[expert].double(), x[of_expert].double(), expanded.double().t())
        of_sums = 302 * 2**-24 * (x[of_expert].double().abs() @ expanded.double().abs().t() + bias[expert].abs())
        assert bool(((part.double() - exact).abs() <= of_sums + 2**-11 * exact.abs() + 2**-25).all())
    fewer = torch.empty(39, 70, dtype=dtype, device=DEVICE)
    with mock.patch.object(grouped_product, "grouped_matmul") as multiply:
        grouped_quantized_matmul(fewer, x, packed, starts_of([3, 0, 35, 1]), rows[:39], bias, may_expand=True)
        grouped_quantized_matmul(out, x, packed, starts_of(counts), rows, bias)
    assert not multiply.called
