"""The product of `--batch-invariant` workers: right, and a row the same in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu import matmul as module
from kernels.gpu.matmul import matmul, tiling
from kernels.oracles import reference
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.kernels.rows import DTYPES, gaps_are_untouched, normal, poisoned, strided

# Of the terms' size: rounding to the type, and the order of sums.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@DTYPES
@pytest.mark.parametrize(
    ("count", "num_outputs", "size"),
    [(1, 10, 33), (67, 37, 130), (3, 300, 1100), (580, 150, 20), (2, 1, 1)],
)
def test_products(dtype: torch.dtype, count: int, num_outputs: int, size: int) -> None:
    x, weight = strided(normal(count, size, dtype=dtype)), normal(num_outputs, size, dtype=dtype, seed=1) / size**0.5
    bias = normal(num_outputs, dtype=dtype, seed=2) if count > 1 else None
    out = poisoned(count, num_outputs, dtype=dtype)
    exact = torch.empty(count, num_outputs, dtype=torch.float64, device=DEVICE)
    matmul(out, x, weight, bias)
    reference.matmul(exact, x.double(), weight.double(), bias if bias is None else bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert gaps_are_untouched(out)


@DTYPES
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and with a few a row's sum is split between programs, with 520 rows it is not."""
    monkeypatch.setattr(module, "_WANTED_PROGRAMS", 8)  # for which 128 tiles need not be interpreted
    size = 300 if dtype == torch.float32 else 1090
    assert tiling(16, size, dtype).num_segments == 2
    x, weight = normal(520, size, dtype=dtype), normal(16, size, dtype=dtype, seed=1)
    launches: list[bool] = []
    bind = module._bound

    def watched(*arguments: Any) -> Any:
        bound = bind(*arguments)
        launches.append(bound.is_split)
        return bound

    monkeypatch.setattr(module, "_bound", watched)
    whole = torch.empty(520, 16, dtype=dtype, device=DEVICE)
    matmul(whole, x, weight)
    # The interpreter multiplies in numpy, where a row's sum depends on its place in the tile: these keep theirs.
    parts = [slice(0, 1), slice(64, 65), slice(512, 520), slice(64, 131)]
    if not IS_INTERPRETED:
        parts += [slice(63, 64), slice(519, 520), slice(60, 131)]
    for rows in parts:
        few = torch.empty_like(whole[rows])
        matmul(few, x[rows], weight)
        assert torch.equal(few, whole[rows])
    assert launches == [False] + [True] * len(parts)


@DTYPES
def test_few_rows_have_the_bits_of_many(dtype: torch.dtype) -> None:
    """In tiles of fewer rows by fewer warps; in the interpreter numbers are such that all sums are exact."""
    x, weight = normal(130, 560, dtype=dtype), normal(140, 560, dtype=dtype, seed=1)
    if IS_INTERPRETED:
        x, weight = (each.clamp(-2, 2).mul(4).round().div(4) for each in (x, weight))
    assert tiling(140, 560, dtype) != tiling(140, 560, dtype).for_few_rows() or dtype == torch.float32
    many = torch.empty(130, 140, dtype=dtype, device=DEVICE)
    matmul(many, x, weight)
    for rows in (slice(0, 1), slice(70, 78), slice(60, 124)):
        few = torch.empty_like(many[rows])
        matmul(few, x[rows], weight)
        assert torch.equal(few, many[rows])


def test_tiles_read_by_descriptor_and_by_address_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows begin at multiples of 16 bytes; elements past the last whole tile, and a segment's border."""
    described: list[bool] = []
    launch = module._matmul_kernel.run

    def watched(*arguments: object, **options: object) -> object:
        described.append(bool(options["IS_DESCRIBED"]))
        return launch(*arguments, **options)

    monkeypatch.setattr(module._matmul_kernel, "run", watched)
    monkeypatch.setattr(module, "_WANTED_PROGRAMS", 2)  # so that few rows are not split, and the border is passed
    x, weight = normal(140, 1096, dtype=torch.float16), normal(72, 1096, dtype=torch.float16, seed=1) / 33
    assert tiling(72, 1096, torch.float16).num_segments == 2
    outs = [poisoned(140, 72, dtype=torch.float16) for _ in range(4)]
    wider = torch.empty(140, 1097, dtype=torch.float16, device=DEVICE)[:, :-1].copy_(x)
    matmul(outs[0], x, weight)
    matmul(outs[1], x, weight, may_describe=False)
    matmul(outs[2], wider, weight)
    matmul(outs[3], x[:, 1:], weight[:, 1:].contiguous())
    assert described == ([True, False, False, False] if module._can_be_described(x, weight) else [False] * 4)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(outs[0].double(), exact, rtol=1e-3, atol=1e-3)


def test_wide_weights_have_wide_tiles_and_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows of more than one tile, the last of them short, and outputs past the last whole tile."""
    assert (tiling(28672, 4096, torch.bfloat16).block_n, tiling(4096, 14336, torch.bfloat16).block_n) == (256, 128)
    monkeypatch.setattr(module, "_WIDE_TILES", 1)
    cut = tiling(270, 1200, torch.float16)
    assert (cut.block_m, cut.block_n, cut.num_segments, cut.num_warps) == (128, 256, 1, 8)
    x, weight = normal(140, 1200, dtype=torch.float16), normal(270, 1200, dtype=torch.float16, seed=1) / 1200**0.5
    out, few = poisoned(140, 270, dtype=torch.float16), poisoned(2, 270, dtype=torch.float16)
    matmul(out, x, weight)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
    assert gaps_are_untouched(out)
    matmul(few, x[128:130], weight)  # in the interpreter a row keeps its place in the tile
    assert torch.equal(few, out[128:130])


def test_segments_are_multiples_of_the_tile_and_cover_the_row() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for num_outputs in (1, 8, 130, 576, 4096, 28672, 128256):
            for size in (1, 64, 576, 1601, 4096, 14336):
                cut = tiling(num_outputs, size, dtype)
                assert cut.segment % cut.block_k == 0
                assert (cut.num_segments - 1) * cut.segment < size <= cut.num_segments * cut.segment
                assert cut.num_segments <= 8 and (cut.num_segments == 1 or cut.segment >= 8 * cut.block_k)


def test_no_row_is_nothing_and_what_does_not_fit_is_refused() -> None:
    x, weight = normal(3, 8), normal(5, 8)
    out = normal(3, 5)
    matmul(out[:0], x[:0], weight)
    matmul(out[:, :0], x, weight[:0])
    with pytest.raises(ValueError, match=r"matmul: out must be \(3, 5\), not \(2, 5\)"):
        matmul(out[:2], x, weight)
    with pytest.raises(ValueError, match=r"weight must be contiguous \(5, 8\), not \(5, 7\)"):
        matmul(out, x, normal(5, 7))
    with pytest.raises(ValueError, match=r"weight is torch\.float16"):
        matmul(out, x, weight.half())
    with pytest.raises(ValueError, match=r"bias must be contiguous \(5,\)"):
        matmul(out, x, weight, normal(4))
