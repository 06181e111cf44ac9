"""Cache writes in Triton against the oracle, bit for bit: into layers of a store, next to what must not be touched."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.cache.reshape_and_cache import reshape_and_cache
from kernels.oracles import reference
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.kernels.stores import bits, store

HAS_FP8 = pytest.mark.skipif(
    not IS_INTERPRETED and torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit floats on this GPU"
)
ROUNDED = pytest.mark.skipif(
    IS_INTERPRETED, reason="Triton's interpreter cuts off what a GPU rounds, and knows no NaN of 8 bits"
)


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of all sizes; exact in every type where `dtype` is the narrower one."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 10).to(dtype).to(DEVICE)


def layer(dtype: torch.dtype, heads: int, block_size: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The second of three layers, full of random bits."""
    return tuple(store(3, 2, 7, heads, block_size, head_size, dtype=dtype, seed=5)[1])


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float16),
        pytest.param(torch.float32, torch.bfloat16, marks=ROUNDED),
    ],
    ids=str,
)
@pytest.mark.parametrize(("heads", "block_size", "head_size"), [(1, 8, 32), (3, 16, 80), (2, 32, 96)])
def test_slots_get_their_tokens_and_nothing_else_changes(
    dtype: torch.dtype, cache_dtype: torch.dtype, heads: int, block_size: int, head_size: int
) -> None:
    slots = torch.tensor([3 * block_size, -1, 7 * block_size - 1, 0, 5 * block_size + 3, -1, 1], device=DEVICE)
    fused = numbers(7, 2 * heads * head_size + 24, dtype=dtype, seed=1)
    key, value = (
        fused[:, start : start + heads * head_size].unflatten(1, (heads, head_size))
        for start in (8, 16 + heads * head_size)
    )
    stores = [layer(cache_dtype, heads, block_size, head_size) for _ in range(2)]
    reshape_and_cache(key, value, *stores[0], slots)
    reference.reshape_and_cache(key, value, *stores[1], slots)
    for got, expected in zip(*stores, strict=True):
        assert torch.equal(bits(got), bits(expected))
    before = layer(cache_dtype, heads, block_size, head_size)[0]
    assert (bits(stores[0][0]) != bits(before)).any(), "something was written"


@HAS_FP8
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("is_rounded", [False, pytest.param(True, marks=ROUNDED)])
def test_eight_bits_hold_what_is_rounded_cut_and_scaled(is_rounded: bool, is_scaled: bool) -> None:
    key, value = (numbers(4, 2, 32, dtype=torch.float32, seed=seed) for seed in (2, 3))
    if not is_rounded:
        key, value = (x.to(torch.float8_e4m3fn).float() for x in (key, value))
    key[0, 0, :4] = torch.tensor([1e6, -1e6, torch.inf, 449.0])
    if is_rounded:
        value[1, 1, 5] = torch.nan
    slots = torch.tensor([9, 2, -1, 31], device=DEVICE)
    scales = {}
    if is_scaled:
        factors = [0.3, 3.0] if is_rounded else [0.25, 2.0]
        scales = {name: torch.tensor(factors, device=DEVICE) for name in ("key_scale", "value_scale")}
    stores = [[torch.zeros(4, 2, 8, 32, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)] for _ in range(2)]
    for write, caches in zip((reshape_and_cache, reference.reshape_and_cache), stores, strict=True):
        write(key, value, caches[0], caches[1], slots, **scales)
    for got, expected in zip(*stores, strict=True):
        assert torch.equal(got.float().nan_to_num(7), expected.float().nan_to_num(7))
    assert stores[0][0].float().abs().max() == 448
    assert stores[0][1].float().isnan().sum() == is_rounded


@pytest.mark.gpu
@pytest.mark.skipif(IS_INTERPRETED, reason="a cache of 4.3 GB, in a GPU's memory")
def test_slots_beyond_32_bits() -> None:
    """Elements beyond 2^31, in blocks whose stride is that of a store."""
    cache = torch.zeros(2, 1 << 20, 1, 16, 64, dtype=torch.bfloat16, device=DEVICE)
    key, value = (numbers(2, 1, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    last = (1 << 24) - 1
    reshape_and_cache(key, value, cache[0], cache[1], torch.tensor([last, 5], device=DEVICE))
    assert torch.equal(cache[0, -1, 0, 15], key[0, 0]) and torch.equal(cache[1, -1, 0, 15], value[0, 0])
    assert torch.equal(cache[0, 0, 0, 5], key[1, 0])


def test_no_tokens_are_nothing_to_do() -> None:
    key_cache, value_cache = layer(torch.float32, 1, 8, 32)
    before = key_cache.clone(), value_cache.clone()
    nothing = torch.empty(0, 1, 32, device=DEVICE)
    reshape_and_cache(nothing, nothing, key_cache, value_cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    for cache, kept in zip((key_cache, value_cache), before, strict=True):
        assert torch.equal(cache.view(torch.int32), kept.view(torch.int32))  # of memory that may hold NaN


def test_what_does_not_fit_is_refused_by_name() -> None:
    key, slots = torch.zeros(2, 2, 32, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    caches = layer(torch.float32, 2, 8, 32)
    for wrong, message in (
        ((key, key[:, :1], *caches, slots), "value"),
        ((key.transpose(0, 1).contiguous().transpose(0, 1), key, *caches, slots), "not contiguous in key"),
        ((key, key, caches[0], caches[1][:3], slots), "differ in shape"),
        ((key, key, *layer(torch.float32, 1, 8, 32), slots), "does not fit key_cache"),
        ((key, key, *layer(torch.float64, 2, 8, 32), slots), "no caches of torch.float64"),
        ((key, key, *caches, slots[:1]), "slot_mapping"),
    ):
        with pytest.raises(ValueError, match=message):
            reshape_and_cache(*wrong)
    with pytest.raises(ValueError, match=r"key_scale of torch\.float32 for a cache of torch\.float32"):
        reshape_and_cache(key, key, *caches, slots, key_scale=torch.ones(2, device=DEVICE))
