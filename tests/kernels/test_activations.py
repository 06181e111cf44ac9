"""Activations and gates of GPU workers against the oracles in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kernels.gpu.rows.clamped_swiglu import clamped_swiglu
from kernels.gpu.rows.gelu import gelu, gelu_and_mul
from kernels.gpu.rows.silu_and_mul import silu_and_mul
from kernels.oracles import reference
from tests.kernels.device import DEVICE
from tests.kernels.rows import DTYPES, TOLERANCE, gaps_are_untouched, normal, poisoned, strided

# The interpreter's numpy says so where a GPU's sigmoid of a large negative number is 0 without a word.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

GATES: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "silu": (silu_and_mul, reference.silu_and_mul),
    "clamped_swiglu": (
        partial(clamped_swiglu, alpha=1.702, limit=7.0),
        partial(reference.clamped_swiglu, alpha=1.702, limit=7.0),
    ),
    "gelu": (partial(gelu_and_mul, is_approximate=False), partial(reference.gelu_and_mul, is_approximate=False)),
    "gelu_tanh": (partial(gelu_and_mul, is_approximate=True), partial(reference.gelu_and_mul, is_approximate=True)),
}
# As far out as an activation is flat on one side, and where exponentials overflow.
EDGES = [0.0, -0.0, 1e-6, -1e-6, 9.0, -9.0, 300.0, -300.0]


def with_edges(x: torch.Tensor) -> torch.Tensor:
    """Large and small values in the first columns, of which there may be few."""
    edges = torch.tensor(EDGES, dtype=x.dtype, device=x.device)[: x.shape[1]]
    x[:, : edges.numel()] = edges
    return x


@DTYPES
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 577), (2, 2053)])
def test_gates(dtype: torch.dtype, name: str, count: int, size: int) -> None:
    kernel, oracle = GATES[name]
    x = strided(with_edges(normal(count, 2 * size, dtype=dtype)))
    out = poisoned(count, size, dtype=dtype)
    exact = torch.empty(count, size, dtype=torch.float64, device=x.device)
    kernel(out, x)
    oracle(exact, x.double())
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert gaps_are_untouched(out) and gaps_are_untouched(x)


def test_a_clamped_gate_is_cut_off_at_its_limit_and_keeps_nan() -> None:
    """Of a gate the large ones alone; of what it multiplies both."""
    gates, ups = [9.0, -9.0, 0.5, 0.5, torch.nan, 1.0], [1.0, 1.0, 9.0, -9.0, 1.0, torch.nan]
    x = torch.tensor([gates + ups], device=DEVICE)
    out, exact = (torch.empty(1, 6, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.float64))
    clamped_swiglu(out, x, alpha=1.5, limit=2.0)
    reference.clamped_swiglu(exact, x.double(), alpha=1.5, limit=2.0)
    # Roundings of 2^-24: an exponent of up to 3, and so three; the exponential, four; a sum, a quotient, a sum and two
    # products.
    torch.testing.assert_close(out.double(), exact, rtol=12 * 2**-24, atol=0, equal_nan=True)
    at_limit = 2 * torch.sigmoid(torch.tensor(3.0, dtype=torch.float64))
    assert exact[0, 0] == 2 * at_limit and -1e-4 < exact[0, 1] < 0
    assert exact[0, 2] == -3 * exact[0, 3] and exact[0, 4:].isnan().all()


@DTYPES
@pytest.mark.parametrize("is_approximate", [False, True])
def test_gelu_in_place_too(dtype: torch.dtype, is_approximate: bool) -> None:
    x = strided(with_edges(normal(3, 1025, dtype=dtype)))
    out, exact = poisoned(3, 1025, dtype=dtype), torch.empty(3, 1025, dtype=torch.float64, device=x.device)
    gelu(out, x, is_approximate=is_approximate)
    reference.gelu(exact, x.double(), is_approximate=is_approximate)
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    gelu(x, x, is_approximate=is_approximate)
    assert torch.equal(x, out) and gaps_are_untouched(x)


def test_the_two_formulas_of_gelu_are_told_apart() -> None:
    x = normal(1, 512)
    outs = [torch.empty_like(x) for _ in range(2)]
    for out, is_approximate in zip(outs, (False, True), strict=True):
        gelu(out, x, is_approximate=is_approximate)
    assert 1e-4 < (outs[0] - outs[1]).abs().max() < 1e-3


@pytest.mark.parametrize("name", GATES)
def test_what_does_not_fit_is_refused_and_no_row_is_nothing(name: str) -> None:
    kernel, _ = GATES[name]
    kernel(normal(0, 4), normal(0, 8))
    with pytest.raises(ValueError, match=r"x must be \(3, 8\) for out \(3, 4\), not \(3, 4\)"):
        kernel(normal(3, 4), normal(3, 4))
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        kernel(normal(3, 4), normal(3, 8).half())
