"""Products with AMX's tiles, emulated where there are none: the order of their sums, and what they leave alone."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import library as library_module
from kernels.cpu.library import Library, TilesError, at_level, library
from kernels.cpu.native import build
from kernels.cpu.native.build import EMULATED, usable_levels
from kernels.cpu.products.packed_weight import pack_pairs
from kernels.int8_weight import pack_int8, quantize_int8
from tests.kernels.cpu_products import int8_linear, matmul

STEP = 32  # inputs that one instruction adds up
# out x in: whole panels and steps, neither, less than one of each, more than all rows are multiplied by at a time.
SIZES = [(96, 64), (60, 158), (5, 2), (49, 600)]
ROWS = (1, 2, 15, 16, 17, 32, 45)

pytestmark = pytest.mark.skipif(EMULATED not in usable_levels(), reason="this processor has no AVX2")


@pytest.fixture(autouse=True, params=[level for level in (EMULATED, "amx") if level in usable_levels()])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    threads = torch.get_num_threads()
    try:
        with at_level(request.param):
            yield request.param
    except TilesError as error:
        pytest.skip(str(error))
    torch.set_num_threads(threads)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, size: int) -> torch.Tensor:
    out = torch.full((x.shape[0], size), float("nan"), dtype=torch.bfloat16)
    matmul(out, x, packed, bias)
    return out


def sums_in_steps(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """As Intel's manual says of TDPBF16PS: within 32 inputs even ones and odd ones by themselves, in float32. A product
    of two bfloat16 is exact there, so that its sum is the fused one."""
    x, weight = x.float(), weight.float()
    total = bias.expand(x.shape[0], -1).clone()
    for first in range(0, x.shape[1], STEP):
        sums = torch.zeros(2, *total.shape)
        for k in range(first, min(first + STEP, x.shape[1])):
            sums[k % 2] += x[:, k, None] * weight[None, :, k]
        total += sums[0] + sums[1]
    return total


@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_sums_of_bfloat16_run_in_the_order_of_the_instruction(out_features: int, in_features: int) -> None:
    weight, x = numbers(out_features, in_features), numbers(37, in_features, seed=1)
    bias = numbers(out_features, seed=2).float()
    expected = sums_in_steps(x, weight, bias).bfloat16()
    assert torch.equal(product(x, pack_pairs(weight), bias, out_features), expected)


@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_a_row_of_bfloat16_has_the_same_bits_alone_and_in_any_company(out_features: int, in_features: int) -> None:
    packed, x = pack_pairs(numbers(out_features, in_features)), numbers(45, in_features, seed=1)
    whole = product(x, packed, None, out_features)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for rows in ROWS:
            assert torch.equal(product(x[-rows:], packed, None, out_features), whole[-rows:]), (num_threads, rows)


@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantised_rows_give_the_bits_of_every_other_processor(
    dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight, scale = quantize_int8(numbers(out_features, in_features))
    packed, x = pack_int8(weight), numbers(45, in_features, seed=1).to(dtype)
    bias = numbers(out_features, seed=2).float()

    def run(rows: int) -> torch.Tensor:
        out = torch.full((rows, out_features), float("nan"), dtype=dtype)
        int8_linear(out, x[:rows], packed, scale, bias)
        return out

    with at_level("plain"):
        expected = run(45)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for rows in ROWS:
            assert torch.equal(run(rows), expected[:rows]), (num_threads, rows)


def test_memory_may_be_strided_and_nothing_beside_it_is_read_or_written() -> None:
    wide, out = torch.full((21, 100), float("nan")).bfloat16(), torch.full((21, 80), -7.0).bfloat16()
    weight, wide[:, 3:73] = numbers(50, 70), numbers(21, 70, seed=1)
    matmul(out[:, 11:61], wide[:, 3:73], pack_pairs(weight))
    assert torch.equal(out[:, 11:61], product(wide[:, 3:73].contiguous(), pack_pairs(weight), None, 50))
    assert (out[:, :11] == -7).all() and (out[:, 61:] == -7).all()


def test_numbers_that_are_none_stay_in_their_row() -> None:
    x, packed = numbers(20, 70), pack_pairs(numbers(50, 70, seed=1))
    clean = product(x, packed, None, 50)
    x[11, 69] = float("nan")
    spoilt, rest = product(x, packed, None, 50), torch.arange(20) != 11
    assert spoilt[11].isnan().all() and torch.equal(spoilt[rest], clean[rest])


def test_tiles_may_be_asked_for_again() -> None:
    assert [library().begin_tiles() for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("failed", "reason"), [(errno.ENOSPC, "refuses them: No space"), (-1, "multiplies wrongly")])
def test_without_leave_or_right_products_the_next_level_is_taken(
    failed: int, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KERNELS_CPU_LEVEL", raising=False)
    plain, check = library_module.load("plain"), library_module._check_tiles

    def load(name: str) -> Library:
        check(failed if name == EMULATED else 0)
        return plain

    monkeypatch.setattr(library_module, "load", load)
    monkeypatch.setattr(library_module, "_in_use", [])
    monkeypatch.setattr(build, "usable_levels", lambda: ["plain", EMULATED])
    assert library() is plain
    (said,) = caplog.messages
    assert reason in said and said.endswith(": CPU kernels are those for plain")
    monkeypatch.setattr(library_module, "_in_use", [])
    monkeypatch.setenv("KERNELS_CPU_LEVEL", EMULATED)
    with pytest.raises(TilesError, match=reason):
        library()
