"""Compiled products of low-rank adapters against the oracle, each row with its own and alike in any company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.lora import lora_expand, lora_shrink
from kernels.oracles import reference

ADAPTERS = torch.tensor([1, 1, -1, 3, 0, 3, 2, -1, 0, 2, 2], dtype=torch.int32)
SCALES = torch.tensor([0.5, 2.0, 1.0, 0.25])
# Of the terms' size; what is added is rounded to the type with the sum.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def weights(rank: int, size: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """On the host, whatever device other kernels' tests are on."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(4, rank, size, generator=generator) / size**0.5
    return a, (torch.randn(4, rank, outputs, generator=generator) / rank**0.5).mT


def rows(count: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize(("rank", "size", "outputs"), [(8, 50, 37), (16, 1100, 130), (72, 30, 20), (1, 1, 1)])
def test_shrink_and_expand(dtype: torch.dtype, rank: int, size: int, outputs: int) -> None:
    count, (a, b) = ADAPTERS.numel(), weights(rank, size, outputs)
    x = rows(count, size + 3, dtype)[:, :size]
    between = torch.full((1, count, rank), torch.nan)
    lora_shrink(between, x, a, ADAPTERS)
    exact = torch.full((1, count, rank), torch.nan, dtype=torch.float64)
    reference.lora_shrink(exact, x.double(), a.double(), ADAPTERS)
    torch.testing.assert_close(between.double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)

    whole = rows(count, outputs + 5, dtype, seed=3)
    before, out = whole.clone(), whole[:, 2 : 2 + outputs]
    expected = before[:, 2 : 2 + outputs].double()
    lora_expand(out, between, b, ADAPTERS, SCALES)
    reference.lora_expand(expected, exact, b.double(), ADAPTERS, SCALES)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(whole[ADAPTERS < 0], before[ADAPTERS < 0])
    assert torch.equal(whole[:, :2], before[:, :2]) and torch.equal(whole[:, 2 + outputs :], before[:, 2 + outputs :])


@DTYPES
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    x, before, (a, b) = rows(11, 70, dtype), rows(11, 33, dtype, seed=3), weights(8, 70, 33)

    def adapt(chosen: list[int]) -> torch.Tensor:
        out, between, adapters = before[chosen], torch.empty(1, len(chosen), 8), ADAPTERS[chosen].contiguous()
        lora_shrink(between, x[chosen], a, adapters)
        lora_expand(out, between, b, adapters, SCALES)
        return out

    together = adapt(list(range(11)))
    for row in range(11):
        assert torch.equal(adapt([row])[0], together[row])
        assert torch.equal(adapt([3, row, 0])[1], together[row])


def test_no_row_is_nothing_and_what_does_not_fit_is_refused() -> None:
    x, out, (a, b) = rows(3, 8, torch.float32), rows(3, 5, torch.float32), weights(4, 8, 5)
    between, adapters = torch.empty(1, 3, 4), ADAPTERS[:3]
    lora_shrink(between[:, :0], x[:0], a, adapters[:0])
    lora_expand(out[:0], between[:, :0], b, adapters[:0], SCALES)
    with pytest.raises(ValueError, match=r"between \(1, 3, 4\), x \(3, 8\) and a \(4, 4, 7\) do not fit"):
        lora_shrink(between, x, a[:, :, :7].contiguous(), adapters)
    with pytest.raises(ValueError, match=r"out \(3, 5\), between \(1, 3, 4\) and b \(4, 5, 3\) do not fit"):
        lora_expand(out, between, b[:, :, :3], adapters, SCALES)
    apart, thin = x.repeat_interleave(2, dim=1)[:, ::2], x[:, :1].expand(3, 8)
    for strided in (apart, thin):
        with pytest.raises(ValueError, match=r"rows \(3, 8\) do not lie line by line"):
            lora_shrink(between, strided, a, adapters)
    with pytest.raises(ValueError, match=r"rows \(3, 5\) do not lie line by line"):
        lora_expand(out.repeat_interleave(2, dim=1)[:, ::2], between, b, adapters, SCALES)
    for scales in (SCALES[:3], SCALES.repeat_interleave(2)[::2]):
        with pytest.raises(ValueError, match="are not one for each of 4 adapters"):
            lora_expand(out, between, b, adapters, scales)
