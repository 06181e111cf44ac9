"""Low-rank adapters: each row with its own, none with another's."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.lora import lora_expand, lora_shrink, num_segments
from kernels.oracles import reference
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.kernels.rows import DTYPES, gaps_are_untouched, normal, strided

# Of the terms' size: what lies between is rounded to the type too, and then scaled, by 2 at most.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def adapters_of(*of_rows: int) -> torch.Tensor:
    return torch.tensor(of_rows, dtype=torch.int32, device=DEVICE)


MIXED = adapters_of(*[1] * 18, -1, 3, 0, 3, 1, -1, 0, *[2] * 9)  # tiles of one, of many and with rows of none
NONE = adapters_of(-1, -1, -1)


@DTYPES
@pytest.mark.parametrize(
    ("adapters", "rank", "size", "num_outputs"),
    [(MIXED, 8, 50, 37), (MIXED, 16, 1100, 130), (MIXED, 72, 30, 20), (adapters_of(3), 1, 1, 1), (NONE, 8, 20, 20)],
    ids=["8", "segments", "72", "one", "none"],
)
def test_shrink_and_expand(dtype: torch.dtype, adapters: torch.Tensor, rank: int, size: int, num_outputs: int) -> None:
    count = adapters.numel()
    x = strided(normal(count, size, dtype=dtype))
    a = normal(4, rank, size, dtype=dtype, seed=1) / size**0.5
    b = normal(4, num_outputs, rank, dtype=dtype, seed=2) / rank**0.5
    a[2, rank // 2 :], b[2, :, rank // 2 :] = 0, 0  # a smaller adapter
    scales = torch.tensor([0.5, 2.0, 1.0, 0.25], device=DEVICE)
    between = torch.full((num_segments(size), count, rank), float("nan"), device=DEVICE)
    lora_shrink(between, x, a, adapters)
    exact = torch.full((1, count, rank), float("nan"), dtype=torch.float64, device=DEVICE)
    reference.lora_shrink(exact, x.double(), a.double(), adapters)
    # Rows without an adapter stay as they are.
    torch.testing.assert_close(between.double().sum(0), exact[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(between[0].isnan().any(1), adapters < 0)

    before = normal(count, num_outputs, dtype=dtype, seed=3)
    out, expected = strided(before), before.double()
    lora_expand(out, between, b, adapters, scales)
    reference.lora_expand(expected, exact, b.double(), adapters, scales)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(out[adapters < 0], before[adapters < 0]) and gaps_are_untouched(out)


@DTYPES
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    """Alone, among others of its adapter and of others; in the interpreter a row keeps its place in the tile."""
    x, before = normal(40, 1030, dtype=dtype), normal(40, 50, dtype=dtype, seed=3)
    a, b = normal(4, 16, 1030, dtype=dtype, seed=1), normal(4, 50, 16, dtype=dtype, seed=2)
    scales = torch.tensor([0.5, 2.0, 1.0, 0.25], device=DEVICE)

    def adapt(rows: list[int], adapters: torch.Tensor) -> torch.Tensor:
        between = torch.empty(num_segments(1030), len(rows), 16, device=DEVICE)
        out = before[rows].clone()
        lora_shrink(between, x[rows], a, adapters)
        lora_expand(out, between, b, adapters, scales)
        return out

    alone = adapt([5], adapters_of(1))[0]
    assert not torch.equal(alone, before[5])
    places = [0, 16] if IS_INTERPRETED else [0, 3, 16, 33]
    for place in places:
        rows = [row for row in range(40) if row != 5]
        rows.insert(place, 5)
        for others in ([1] * 40, [0, 2, 3, 1, -1] * 8):
            adapters = adapters_of(*others)
            adapters[place] = 1
            assert torch.equal(adapt(rows, adapters)[place], alone)


def test_no_row_is_nothing_and_what_does_not_fit_is_refused() -> None:
    x, a, b, adapters = normal(3, 8), normal(2, 4, 8), normal(2, 5, 4), adapters_of(0, 1, -1)
    between, out, scales = normal(1, 3, 4), normal(3, 5), normal(2)
    lora_shrink(between[:, :0], x[:0], a, adapters[:0])
    lora_expand(out[:0], between[:, :0], b, adapters[:0], scales)
    with pytest.raises(ValueError, match=r"between must be contiguous \(1, 3, 4\), not \(2, 3, 4\)"):
        lora_shrink(normal(2, 3, 4), x, a, adapters)
    with pytest.raises(ValueError, match=r"lora_shrink: a must be contiguous \(2, 4, 8\)"):
        lora_shrink(between, x, normal(2, 4, 7), adapters)
    with pytest.raises(ValueError, match=r"lora_expand: b must be contiguous \(2, 5, 4\)"):
        lora_expand(out, between, normal(2, 5, 3), adapters, scales)
    with pytest.raises(ValueError, match=r"adapters must be int32, not torch\.int64"):
        lora_expand(out, between, b, adapters.long(), scales)
    with pytest.raises(ValueError, match="between and scales must be float32"):
        lora_expand(out, between, b, adapters, scales.half())
