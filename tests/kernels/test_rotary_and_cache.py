"""Rotation and cache writes in one launch against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import cpu
from kernels.gpu.cache import rotary_and_cache as module
from kernels.gpu.rows.rms_norm import rms_norm
from kernels.oracles import reference
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.kernels.rows import normal
from tests.kernels.stores import bits

rotary_and_cache: Callable[..., None] = module.rotary_and_cache
exact_rotary_and_cache: Callable[..., None] = reference.rotary_and_cache
cpu_rotary_and_cache: Callable[..., None] = cpu.rotary_and_cache

SLOTS = torch.tensor([3, 39, -1, 0, 17, -1, 16], device=DEVICE)
ROUNDED = pytest.mark.skipif(
    IS_INTERPRETED, reason="Triton's interpreter does not round to bfloat16 and to 8 bits as a GPU does"
)
TYPES = pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
        pytest.param(torch.bfloat16, torch.bfloat16, marks=ROUNDED),
        pytest.param(torch.bfloat16, torch.float8_e4m3fn, marks=ROUNDED),
    ],
    ids=str,
)


def caches(num_kv_heads: int, head_size: int, stored: torch.dtype) -> list[torch.Tensor]:
    """Of 5 blocks of 8 slots, one layer of a store: NaN, and NaN between them."""
    store = torch.full((5, 2, num_kv_heads, 8, head_size), float("nan"), device=DEVICE).to(stored)
    return list(store.unbind(1))


@TYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "rotary_size"), [(6, 2, 80, 80), (3, 3, 96, 24), (9, 1, 10, 10)]
)
def test_keys_are_rotated_on_their_way_and_the_query_in_place(
    dtype: torch.dtype, stored: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int, rotary_size: int
) -> None:
    heads = num_heads + 2 * num_kv_heads
    fused = normal(7, heads, head_size, dtype=dtype)
    parts = (num_heads, num_kv_heads, num_kv_heads)
    query, key, value = fused.split(parts, dim=1)
    exact_query, exact_key, exact_value = fused.clone().split(parts, dim=1)
    positions, table = torch.tensor([0, 3, 30, 3, 7, 1, 29], device=DEVICE), normal(31, rotary_size, seed=2)
    ours, expected = (caches(num_kv_heads, head_size, stored) for _ in range(2))
    rotary_and_cache(query, key, value, positions, table, *ours, SLOTS)
    exact_rotary_and_cache(exact_query, exact_key, exact_value, positions, table, expected[0], expected[1], SLOTS)
    assert torch.equal(value, exact_value)
    # A GPU may round a product and a sum at once, torch rounds twice: one unit in the last place of either type.
    unit = max(torch.finfo(dtype).eps, torch.finfo(stored).eps)
    torch.testing.assert_close(query.float(), exact_query.float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(ours[0].float(), expected[0].float(), rtol=unit, atol=1e-6, equal_nan=True)
    assert torch.equal(bits(ours[1]), bits(expected[1]))


@ROUNDED
def test_keys_and_values_are_divided_by_their_heads_scales() -> None:
    query, key, value = (normal(7, 2, 64, seed=seed) for seed in range(3))
    positions, table = torch.arange(7, device=DEVICE), normal(31, 64, seed=2)
    scales = {name: torch.tensor([0.1, 3.0], device=DEVICE) for name in ("key_scale", "value_scale")}
    ours, expected = (caches(2, 64, torch.float8_e4m3fn) for _ in range(2))
    rotary_and_cache(query.clone(), key.clone(), value, positions, table, *ours, SLOTS, **scales)
    exact_rotary_and_cache(query, key, value, positions, table, expected[0], expected[1], SLOTS, **scales)
    torch.testing.assert_close(ours[0].float(), expected[0].float(), rtol=0.125, atol=1e-2, equal_nan=True)
    assert torch.equal(bits(ours[1]), bits(expected[1]))


def test_what_does_not_fit_is_refused() -> None:
    x, (key_cache, value_cache), slots = normal(7, 2, 16), caches(2, 16, torch.float32), SLOTS.abs()
    for arguments, message in (
        ((x, x, x, slots, normal(31, 18), key_cache, value_cache, SLOTS), "cannot be turned in halves"),
        ((x, x, x, slots, normal(31, 16), key_cache, value_cache.half(), SLOTS), "differ in"),
        ((x[:, :, :8], x, x, slots, normal(31, 16), key_cache, value_cache, SLOTS), "does not fit key"),
        ((x, x, x, slots[:3], normal(31, 16), key_cache, value_cache, SLOTS), "positions must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            rotary_and_cache(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=ROUNDED)], ids=str)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "rotary_size"), [(6, 2, 80, 80), (3, 3, 96, 24), (9, 1, 10, 10)]
)
def test_heads_are_normed_before_they_are_turned(
    dtype: torch.dtype, weight_offset: float, num_heads: int, num_kv_heads: int, head_size: int, rotary_size: int
) -> None:
    """The bits are those of the norm by itself, and rotation after it; those of a card, which may share an odd head out
    to threads in another way than a row, are as near to the exact ones."""
    parts = (num_heads, num_kv_heads, num_kv_heads)
    fused = 3 * normal(7, sum(parts), head_size, dtype=dtype)
    query, key, value = fused.split(parts, dim=1)
    one_by_one = fused.clone().split(parts, dim=1)
    exact = fused.double().split(parts, dim=1)
    positions, table = torch.tensor([0, 3, 30, 3, 7, 1, 29], device=DEVICE), normal(31, rotary_size, seed=2)
    weights = [1 + normal(head_size, dtype=dtype, seed=seed) / 4 for seed in (3, 4)]
    options = {"norm_eps": 1e-5, "norm_weight_offset": weight_offset}
    ours, twin, expected = (caches(num_kv_heads, head_size, kind) for kind in (dtype, dtype, torch.float64))
    rotary_and_cache(
        query, key, value, positions, table, *ours, SLOTS, query_norm=weights[0], key_norm=weights[1], **options
    )
    for heads, weight in zip(one_by_one, weights, strict=False):
        rows = heads.reshape(-1, head_size).clone()
        rms_norm(rows, rows, weight, eps=1e-5, weight_offset=weight_offset)
        heads.copy_(rows.view(heads.shape))
    rotary_and_cache(*one_by_one, positions, table, *twin, SLOTS)
    exact_weights = {"query_norm": weights[0].double(), "key_norm": weights[1].double()}
    exact_rotary_and_cache(
        *exact, positions, table.double(), expected[0], expected[1], SLOTS, **exact_weights, **options
    )
    # Three roundings: of the norm, of its weighting, of the rotation; each of numbers up to twice as large.
    tolerance = 6 * torch.finfo(dtype).eps
    torch.testing.assert_close(query.double(), exact[0], rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(ours[0].double(), expected[0], rtol=tolerance, atol=4 * tolerance, equal_nan=True)
    if IS_INTERPRETED:
        assert torch.equal(query, one_by_one[0]) and torch.equal(bits(ours[0]), bits(twin[0]))
    assert torch.equal(bits(ours[1]), bits(twin[1]))


@pytest.mark.parametrize("rotary_size", [16, 8])
def test_a_cpu_norms_heads_as_the_oracle_does(rotary_size: int) -> None:
    query, key, value = (normal(7, heads, 16, seed=heads).cpu() for heads in (4, 2, 2))
    exact = [x.double() for x in (query, key, value)]
    positions, table, slots = torch.arange(7), normal(31, rotary_size, seed=2).cpu(), SLOTS.cpu()
    weights = [normal(16, seed=seed).cpu() for seed in (3, 4)]
    ours, expected = (
        [torch.full((5, 2, 8, 16), torch.nan, dtype=kind) for _ in range(2)] for kind in (torch.float32, torch.float64)
    )
    names = ("query_norm", "key_norm")
    cpu_rotary_and_cache(
        query, key, value, positions, table, *ours, slots, **dict(zip(names, weights, strict=True)), norm_eps=1e-5
    )
    doubled = {name: weight.double() for name, weight in zip(names, weights, strict=True)}
    exact_rotary_and_cache(*exact, positions, table.double(), *expected, slots, **doubled, norm_eps=1e-5)
    torch.testing.assert_close(query.double(), exact[0], rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(ours[0].double(), expected[0], rtol=3e-6, atol=3e-6, equal_nan=True)


def test_one_norm_without_the_other_is_refused() -> None:
    x, slots = normal(7, 2, 16), SLOTS.abs()
    arguments = (x, x, x, slots, normal(31, 16), *caches(2, 16, torch.float32), SLOTS)
    for norms, message in (
        ({"query_norm": normal(16)}, "or neither"),
        ({"query_norm": normal(16), "key_norm": normal(8)}, "key_norm must be contiguous"),
        ({"query_norm": normal(16), "key_norm": normal(16).half()}, "key_norm is torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            rotary_and_cache(*arguments, **norms)
