"""The dense layer: right values, and rows of a product that do not depend on how many rows there are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from worker_svc.models.float_linear import FloatLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536), (60, 157), (1031, 60)])
def test_rows_are_bit_equal_for_every_number_of_rows_from_two(
    dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((out_features, in_features), (out_features,), (300, in_features))
    )
    weight /= in_features**0.5
    linear = FloatLinear(weight, bias)
    with torch.inference_mode():
        whole = linear(x)
        for rows in (2, 3, 5, 8, 17, 32, 33, 64, 129, 256):
            assert torch.equal(linear(x[:rows].contiguous()), whole[:rows]), rows
    exact = functional.linear(x.double(), weight.double(), bias.double())
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2  # bfloat16: half a unit in the last place of 4
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=tolerance)


def test_bytes_are_those_of_weight_and_bias() -> None:
    assert FloatLinear(torch.ones(3, 5)).weight_bytes == 60
    assert FloatLinear(torch.ones(3, 5), torch.ones(3)).weight_bytes == 72
