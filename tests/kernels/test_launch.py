"""Launches that are bound once: what they hand on is what Triton's own launch does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.stand_in_driver import StandInDriver
from kernels.gpu import matmul
from kernels.gpu.attention import joins, plans
from kernels.gpu.experts import grouped_matmul, score_experts
from kernels.gpu.latent import latent_and_cache, latent_attention
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.quantized import grouped_product
from kernels.gpu.quantized.packed_codes import PackedCodes, pack_codes, stacked
from kernels.gpu.rows import clamped_swiglu
from kernels.gpu.rows.rms_norm import rms_norm
from tests.kernels.device import DEVICE
from tests.kernels.quantized_weights import q4_1


def _kernel(out, x, residual, count, stride, SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    pass


class Recorded(CompiledKernel):  # type: ignore[misc]  # Triton has no types
    """Triton's own, but for the driver behind it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.name, self.src, self.module, self.function, self.packed_metadata = "kernel", None, (), "function", "data"
        self._run = lambda *args: self.calls.append(args)


def test_a_bound_launch_hands_on_what_tritons_own_does() -> None:
    compiled, out, x = Recorded(), torch.zeros(5, 16), torch.ones(5, 16)
    launch = Launch(JITFunction(_kernel), (3, 2), (5, 16), SIZE=16, HAS_RESIDUAL=False, num_warps=8)
    with mock.patch.object(driver, "_active", StandInDriver()):
        with mock.patch.object(JITFunction, "_do_compile", lambda *args: compiled):
            launch(out, x, None)
        launch(out, x, None)  # nothing is compiled any more
    by_triton, bound = compiled.calls
    assert by_triton[:6] == bound[:6] == (3, 2, 1, 0, "function", "data")
    assert by_triton[9:] == bound[9:] == (out, x, None, 5, 16, 16, False)  # after metadata and hooks


def test_descriptors_of_tiles_are_handed_on_anew_at_each_launch() -> None:
    compiled, out = Recorded(), torch.zeros(64, 64)
    launch = Launch(JITFunction(_kernel), (1,), (5, 64), SIZE=16, HAS_RESIDUAL=False)
    tiles = [TensorDescriptor(torch.full((32, 64), float(fill)), [32, 64], [64, 1], [16, 16]) for fill in range(3)]
    with mock.patch.object(driver, "_active", StandInDriver()):
        with mock.patch.object(JITFunction, "_do_compile", lambda *args: compiled):
            launch(out, tiles[0], None)
        launch(out, tiles[1], None)
        launch(out, tiles[2], None)
    assert [call[9:] for call in compiled.calls] == [(out, tile, None, 5, 64, 16, False) for tile in tiles]


def _rows(*shape: int) -> torch.Tensor:
    """Of numbers of tensors that no other test has, as what is bound is kept."""
    return torch.zeros(*shape, 23)


def _latent_arguments() -> tuple[torch.Tensor, ...]:
    tables, lens = torch.zeros(1, 3, dtype=torch.int32), torch.full((1,), 7, dtype=torch.int32)
    return torch.empty(3, 1, 20), _rows(3, 1), _rows(4, 1, 8), tables, lens, torch.tensor([0, 3], dtype=torch.int32)


def _packed_experts() -> PackedCodes:
    packed = pack_codes(q4_1(37, 64, torch.Generator()))
    assert packed is not None
    return stacked([packed, packed])


OPERATIONS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "matmul": (matmul, lambda: matmul.matmul(torch.empty(3, 37), _rows(3), _rows(37))),
    "split matmul": (
        matmul,
        lambda: matmul.matmul(torch.empty(3, 37), torch.zeros(3, 4096), torch.zeros(37, 4096), torch.zeros(37)),
    ),
    "grouped_matmul": (
        grouped_matmul,
        lambda: grouped_matmul.grouped_matmul(
            torch.empty(5, 37), _rows(5), _rows(2, 37), torch.tensor([0, 2, 5], dtype=torch.int32)
        ),
    ),
    "grouped_quantized_matmul": (
        grouped_product,
        lambda: grouped_product.grouped_quantized_matmul(
            torch.empty(5, 37), torch.zeros(5, 64), _packed_experts(), torch.tensor([0, 2, 5], dtype=torch.int32)
        ),
    ),
    "clamped_swiglu": (
        clamped_swiglu,
        lambda: clamped_swiglu.clamped_swiglu(_rows(3), torch.zeros(3, 46), alpha=1.7, limit=7.0),
    ),
    "score_experts": (
        score_experts,
        lambda: score_experts.score_experts(torch.empty(3, 2), torch.empty(3, 23), _rows(3)),
    ),
    "latent_and_cache": (
        latent_and_cache,
        lambda: latent_and_cache.latent_and_cache(
            torch.empty(3, 1, 6),
            torch.zeros(3, 1, 6),
            _rows(3),
            torch.ones(17),
            torch.zeros(3, dtype=torch.int64),
            torch.zeros(9, 6),
            _rows(4, 1, 8),
            torch.zeros(3, dtype=torch.int64),
            norm_eps=1e-5,
            are_pairs=True,
        ),
    ),
    "latent_attention": (
        latent_attention,
        lambda: latent_attention.latent_attention(*_latent_arguments(), scale=0.3, max_query_len=3, max_seq_len=7),
    ),
}


@contextmanager
def nothing_launched() -> Iterator[None]:
    """A kernel that is launched fails, as it does on a GPU with tensors of the CPU."""

    def refuse(kernel: Any, grid: Any) -> Any:
        raise AssertionError(f"{kernel.__name__} is launched on tensors of the CPU")

    with (
        mock.patch.object(JITFunction, "__getitem__", refuse),
        mock.patch.object(InterpretedFunction, "__getitem__", refuse),
    ):
        yield


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_binds_its_launches_once_a_layout(name: str) -> None:
    module, call = OPERATIONS[name]
    # What it launches besides is for no tensors on a CPU, where there is a GPU.
    besides = mock.patch.object(plans, "plan_kernel"), mock.patch.object(grouped_product, "group_sums")
    of_joins = mock.patch.object(joins, "Launch")
    with mock.patch.object(module, "Launch") as made, besides[0], besides[1], of_joins, nothing_launched():
        call()
        num_bound, num_launched = made.call_count, made.return_value.call_count
        call()
    assert made.call_count == num_bound >= 1
    assert made.return_value.call_count == 2 * num_launched >= 2


def test_an_empty_grid_launches_nothing() -> None:
    kernel = mock.MagicMock()
    Launch(kernel, (0, 4), ())(torch.zeros(0))
    assert not kernel.mock_calls


def test_what_is_bound_is_bound_once_a_layout_and_checked_then() -> None:
    bound: list[tuple[Any, ...]] = []

    @once_a_layout
    def bind(x: torch.Tensor, other: torch.Tensor | None, eps: float) -> int:
        if x.shape[0] > 4:
            raise ValueError("too long")
        bound.append((x.shape, eps))
        return len(bound)

    store = torch.zeros(64)
    x = store[:8].view(4, 2)
    assert bind((x, None), 0.5) == bind((torch.ones(4, 2), None), 0.5) == 1
    others = [
        ((x[:3], None), 0.5),
        ((x.t()[:, :2], None), 0.5),
        ((x.int(), None), 0.5),
        ((store[1:9].view(4, 2), None), 0.5),  # 4 bytes after a multiple of 16, for which a kernel is compiled apart
        ((x, x), 0.5),
        ((x, None), 0.25),
    ]
    assert [bind(*other) for other in others] == [2, 3, 4, 5, 6, 7]
    assert [bind(*other) for other in others] == [2, 3, 4, 5, 6, 7]
    for _ in range(2):
        with pytest.raises(ValueError, match="too long"):
            bind((torch.zeros(5, 2), None), 0.5)


def test_what_does_not_fit_is_refused_after_what_does() -> None:
    x, weight = torch.ones(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    rms_norm(torch.empty_like(x), x, weight, eps=1e-5)
    others = (torch.empty_like(x), weight[:7]), (torch.empty_like(x, dtype=torch.float16), weight)
    for out, other in others:
        with pytest.raises(ValueError, match="rms_norm"):
            rms_norm(out, x, other, eps=1e-5)
