"""The dense layer: right values, and rows of a product that do not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from kernels.cpu.library import at_level, library
from kernels.cpu.native.build import WITH_PAIRS, usable_levels
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.products.dense import dense
from worker_svc.models.products.float_linear import FloatLinear
from worker_svc.models.products.packed_linear import packed_linear

HAS_PAIRS = pytest.mark.skipif(
    not library().has_pairs and WITH_PAIRS not in usable_levels(),
    reason="this processor has no products of bfloat16 pairs",
)


@pytest.fixture(params=[False, pytest.param(True, marks=HAS_PAIRS)], ids=["floats", "pairs"])
def has_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with at_level(WITH_PAIRS if request.param and not library().has_pairs else library().level):
        monkeypatch.setattr(library(), "has_pairs", request.param)
        yield


@pytest.mark.usefixtures("has_pairs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536), (60, 157), (1031, 60)])
def test_rows_are_bit_equal_for_every_number_of_rows(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    """Of every type, with and without instructions for bfloat16, as `dense` chooses unasked."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((out_features, in_features), (out_features,), (300, in_features))
    )
    weight /= in_features**0.5
    linear = dense(weight, bias)
    with torch.inference_mode():
        whole = linear(x)
        for rows in (1, 2, 3, 5, 8, 17, 32, 33, 64, 129, 256):
            assert torch.equal(linear(x[:rows].contiguous()), whole[:rows]), rows
    exact = functional.linear(x.double(), weight.double(), bias.double())
    magnitudes = functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    # float32 sums of some hundred terms, whose roundings mostly cancel; a bfloat16 result is then rounded once more.
    bound = 2e-6 * magnitudes + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)
    assert ((whole.double() - exact).abs() <= bound).all()


def test_bytes_are_those_of_weight_and_bias() -> None:
    assert FloatLinear(torch.ones(3, 5)).weight_bytes == 60
    assert FloatLinear(torch.ones(3, 5), torch.ones(3)).weight_bytes == 72


def test_packed_bytes_are_those_of_whole_panels_and_half_where_nothing_is_lost() -> None:
    assert packed_linear(torch.ones(50, 5) / 3).weight_bytes == 2 * 48 * 5 * 4
    assert packed_linear(torch.ones(50, 5), torch.ones(50)).weight_bytes == 2 * 48 * 5 * 2 + 50 * 4
    assert packed_linear(torch.ones(50, 6, dtype=torch.bfloat16)).weight_bytes == 2 * 48 * 6 * 2


@pytest.mark.parametrize("is_biased", [False, True])
def test_both_forms_compute_the_same_layer(is_biased: bool) -> None:
    weight, x = torch.randn(50, 20), torch.randn(7, 20)
    bias = torch.randn(50) if is_biased else None
    torch.testing.assert_close(packed_linear(weight, bias)(x), FloatLinear(weight, bias)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_on_a_cpu_every_layer_is_of_the_form_that_takes_each_row_alone(
    dtype: torch.dtype, is_batch_invariant: bool
) -> None:
    assert isinstance(dense(torch.ones(3, 5, dtype=dtype), is_batch_invariant=is_batch_invariant), CompiledLinear)
