"""The norms of GPU workers against the oracles in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.gpu.rows.layer_norm import layer_norm
from kernels.gpu.rows.rms_norm import rms_norm
from kernels.gpu.tiles import MAX_ROW
from kernels.oracles import reference
from tests.kernels.rows import DTYPES, TOLERANCE, gaps_are_untouched, normal, poisoned, strided

EPS = 1e-5


def check(
    kernel: Callable[..., None], oracle: Callable[..., None], x: torch.Tensor, *vectors: torch.Tensor, **options: Any
) -> None:
    """With and without a residual, rows apart and in place."""
    exact = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    wide = [vector.double() for vector in vectors]
    tolerance = TOLERANCE[x.dtype]

    out, source = poisoned(*x.shape, dtype=x.dtype), strided(x)
    kernel(out, source, *vectors, eps=EPS, **options)
    oracle(exact, x.double(), *wide, eps=EPS, **options)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(source, x) and gaps_are_untouched(out) and gaps_are_untouched(source)

    before = normal(*x.shape, dtype=x.dtype, seed=9)
    residual, in_place = strided(before), x.clone()
    kernel(in_place, in_place, *vectors, eps=EPS, residual=residual, **options)
    total = (x.float() + before.float()).to(x.dtype)  # rounded before it is normed
    assert torch.equal(residual, total) and gaps_are_untouched(residual)
    oracle(exact, total.double(), *wide, eps=EPS, **options)
    torch.testing.assert_close(in_place.double(), exact, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize(("count", "size"), [(1, 1), (67, 32), (5, 577), (3, 2048), (2, 4099)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, count: int, size: int, offset: float) -> None:
    x, weight = normal(count, size, dtype=dtype), normal(size, dtype=dtype, seed=1)
    check(rms_norm, reference.rms_norm, x, weight, weight_offset=offset)


@DTYPES
@pytest.mark.parametrize(("count", "size"), [(1, 1), (67, 32), (5, 577), (3, 2048), (2, 4099)])
def test_layer_norm(dtype: torch.dtype, count: int, size: int) -> None:
    # Far from zero, where E[y^2] - E[y]^2 would have lost its digits.
    x = normal(count, size, dtype=dtype) + 8
    check(layer_norm, reference.layer_norm, x, normal(size, dtype=dtype, seed=1), normal(size, dtype=dtype, seed=2))


def test_rms_norm_rounds_before_it_weighs_unless_it_has_an_offset() -> None:
    """Llama's and Gemma's ways differ in the last bit of float16: each as its oracle says, to the bit."""
    x, weight = normal(16, 64, dtype=torch.float16), normal(64, dtype=torch.float16, seed=1)
    outs = []
    for offset in (0.0, 1e-30):  # too small to change a weight
        out, expected = torch.empty_like(x), torch.empty_like(x)
        rms_norm(out, x, weight, eps=EPS, weight_offset=offset)
        reference.rms_norm(expected, x, weight, eps=EPS, weight_offset=offset)
        # A sum of squares in another order may put a norm on the other side of a rounding border.
        assert (out == expected).float().mean() > 0.99
        outs.append(out)
    assert (outs[0] == outs[1]).float().mean() < 0.95


@pytest.mark.parametrize("size", [96, 2560])
def test_a_row_is_the_same_in_any_company(size: int) -> None:
    x, residual, weight, bias = (
        normal(*shape, seed=seed) for seed, shape in enumerate([(37, size)] * 2 + [(size,)] * 2)
    )
    for kernel, vectors in ((rms_norm, (weight,)), (layer_norm, (weight, bias))):
        whole, kept = torch.empty_like(x), residual.clone()
        kernel(whole, x, *vectors, eps=EPS, residual=kept)
        for row in (0, 17, 36):
            alone, own = torch.empty(1, size, device=x.device), residual[row : row + 1].clone()
            kernel(alone, x[row : row + 1], *vectors, eps=EPS, residual=own)
            assert torch.equal(alone[0], whole[row]) and torch.equal(own[0], kept[row])


def test_the_widest_row_and_no_row() -> None:
    x, weight = normal(1, MAX_ROW), normal(MAX_ROW, seed=1)
    check(rms_norm, reference.rms_norm, x, weight)
    rms_norm(x[:0], x[:0], weight, eps=EPS)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = normal(4, 8), normal(8)
    with pytest.raises(ValueError, match="does not fit in registers; 32768 is the most"):
        rms_norm(normal(1, MAX_ROW + 1), normal(1, MAX_ROW + 1), normal(MAX_ROW + 1), eps=EPS)
    with pytest.raises(ValueError, match=r"rms_norm: out is \(3, 8\), not \(4, 8\)"):
        rms_norm(x[:3], x, weight, eps=EPS)
    with pytest.raises(ValueError, match=r"layer_norm: residual is torch.float16 on cpu|on cuda"):
        layer_norm(x, x, weight, weight, eps=EPS, residual=x.half())
    with pytest.raises(ValueError, match="rms_norm: x must be rows of adjacent elements"):
        rms_norm(x, normal(8, 4).t(), weight, eps=EPS)
    with pytest.raises(ValueError, match=r"layer_norm: bias must be contiguous \(8,\)"):
        layer_norm(x, x, weight, weight[:7], eps=EPS)
