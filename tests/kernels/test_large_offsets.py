"""Rows that lie more than 2^31 elements apart: an offset of 32 bits would wrap to an address of nobody's.

Memory that is never touched costs nothing on a CPU, so the interpreter can show it; a GPU has to have it.
"""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import operations as gpu
from kernels.gpu.lora import num_segments
from kernels.oracles import reference
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.kernels.rows import normal

APART = 2**30 + 16  # elements from row to row, of which there are three
NEEDED_BYTES = 3 * 3 * 2 * APART

pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED and torch.cuda.mem_get_info()[1] < 1.5 * NEEDED_BYTES, reason="needs 18 GiB of GPU memory"
)


def far(rows: torch.Tensor) -> torch.Tensor:
    """The same three rows in float16, far apart."""
    store = torch.empty(2 * APART + rows.shape[1], dtype=torch.float16, device=DEVICE)
    view = store.as_strided(rows.shape, (APART, 1))
    assert 2 * APART > 2**31
    return view.copy_(rows)


def near(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, dtype=torch.float16, seed=seed)


def test_norms() -> None:
    x, residual, weight, bias = near(3, 40), near(3, 40, seed=1), near(40, seed=2), near(40, seed=3)
    for kernel, vectors in ((gpu.rms_norm, (weight,)), (gpu.layer_norm, (weight, bias))):
        expected, total = torch.empty_like(x), residual.clone()
        kernel(expected, x, *vectors, eps=1e-5, residual=total)
        out, rest = far(torch.zeros_like(x)), far(residual)
        kernel(out, far(x), *vectors, eps=1e-5, residual=rest)
        assert torch.equal(out, expected) and torch.equal(rest, total)


def test_activations() -> None:
    x, out, expected = near(3, 80), far(torch.zeros(3, 40)), torch.empty(3, 40, dtype=torch.float16, device=DEVICE)
    gpu.silu_and_mul(expected, x)
    gpu.silu_and_mul(out, far(x))
    assert torch.equal(out, expected)
    gpu.gelu(expected, x[:, :40], is_approximate=True)
    gpu.gelu(out, far(x[:, :40]), is_approximate=True)
    assert torch.equal(out, expected)


def test_rotary() -> None:
    query, key, table = near(3, 64), near(3, 32, seed=1), normal(9, 32)
    positions = torch.tensor([8, 0, 3], device=DEVICE)
    far_query, far_key = far(query), far(key)
    for one, other in ((query, key), (far_query, far_key)):
        gpu.rotary(one.unflatten(1, (2, 32)), other.unflatten(1, (1, 32)), positions, table)
    assert torch.equal(far_query, query) and torch.equal(far_key, key)


def test_products() -> None:
    x, weight, expected = near(3, 40), near(24, 40, seed=1), near(3, 24, seed=2)
    out = far(expected)
    gpu.matmul(expected, x, weight)
    gpu.matmul(out, far(x), weight)
    assert torch.equal(out, expected)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    weights = near(2, 24, 40, seed=3)
    gpu.grouped_matmul(expected, x, weights, starts)
    gpu.grouped_matmul(out, far(x), weights, starts)
    assert torch.equal(out, expected)


def test_adapters() -> None:
    x, before, a, b = near(3, 40), near(3, 24, seed=1), near(2, 8, 40, seed=2), near(2, 24, 8, seed=3)
    adapters, scales = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE), normal(2)
    out, expected = far(before), before.clone()
    for one, rows in ((expected, x), (out, far(x))):
        between = torch.empty(num_segments(40), 3, 8, device=DEVICE)
        gpu.lora_shrink(between, rows, a, adapters)
        gpu.lora_expand(one, between, b, adapters, scales)
    assert torch.equal(out, expected) and not torch.equal(out, before)


def test_blocks() -> None:
    cache = torch.empty(1, 2, 1_100_000, 1, 16, 128, dtype=torch.float16, device=DEVICE)
    assert cache[0, 0].numel() > 2**31
    cache[:, :, 1_099_999] = near(1, 2, 1, 16, 128)
    pairs = torch.tensor([[1_099_999, 1_090_000], [1_099_999, 3]], device=DEVICE)
    gpu.copy_blocks(cache, cache, pairs)
    for block in (1_090_000, 3):
        assert torch.equal(cache[:, :, block], cache[:, :, 1_099_999])
    expected = cache[:, :, [3]].clone()
    reference.copy_blocks(cache, cache, pairs)
    assert torch.equal(cache[:, :, [3]], expected)
