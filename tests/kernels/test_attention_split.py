"""Attention whose items are cut for the threads has the bits of whole items, whatever is cut where."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels import cpu
from kernels.cpu.attention.attention_split import attend_split
from kernels.cpu.attention.attention_tiles import cut
from tests.kernels.cases import PagedCase

paged_attention: Callable[..., None] = cpu.paged_attention
NO_SLOPES = np.empty(0, dtype=np.float32)


def attend_with(threads: int, case: PagedCase, **options: Any) -> torch.Tensor:
    before, out = torch.get_num_threads(), torch.full_like(case.query, float("nan"))
    torch.set_num_threads(threads)
    try:
        paged_attention(out, *case.arguments, **case.options, **options)
    finally:
        torch.set_num_threads(before)
    return out


def attend_cut(
    threads: int, case: PagedCase, slopes: torch.Tensor | None = None, window: int = 0, cap: float = 0.0
) -> torch.Tensor:
    """float32, however little there is to cut."""
    out, (_, num_kv_heads, block_size, head_size) = torch.full_like(case.query, float("nan")), case.key_cache.shape
    tables, seq_lens, starts = (t.numpy() for t in (case.block_tables, case.seq_lens, case.query_starts))
    attend_split(
        threads,
        cut(tables, seq_lens, starts, block_size, window),
        out.flatten(1).numpy(),
        case.query.flatten(1).numpy(),
        case.key_cache.flatten().numpy(),
        case.value_cache.flatten().numpy(),
        (num_kv_heads, block_size, head_size),
        case.group,
        tables,
        seq_lens,
        starts,
        NO_SLOPES if slopes is None else slopes.numpy(),
        np.float32(case.options["scale"]),
        window,
        np.float32(cap),
    )
    return out


def one_token_each(rng: random.Random, longest: int, **sizes: Any) -> PagedCase:
    lens = [rng.choice([1, 16, 63, 64, 65, rng.randint(1, longest)]) for _ in range(rng.randint(1, 4))]
    return PagedCase([1] * len(lens), [seq_len - 1 for seq_len in lens], seed=rng.randrange(2**31), **sizes)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_cut_has_the_bits_of_whole_items(seed: int) -> None:
    rng = random.Random(seed)
    num_kv_heads, group = rng.randint(1, 4), rng.randint(1, 8)
    sizes = {"head_size": 16 * rng.choice([1, 2, 3, 4, 5, 8, 16]), "block_size": 16 * rng.randint(1, 4)}
    case = one_token_each(rng, 700, num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads, **sizes)
    slopes = torch.rand(num_kv_heads * group) if rng.random() < 0.3 else None
    window, cap = rng.choice([0, 0, 1, 30, 64, 300]), rng.choice([0.0, 0.0, 0.6])
    whole = attend_with(1, case, alibi_slopes=slopes, sliding_window=window, logit_soft_cap=cap)
    for threads in (1, 2, 3, 5, 16):
        assert torch.equal(attend_cut(threads, case, slopes, window, cap), whole), (threads, case.seq_lens)


@pytest.mark.parametrize("context", [999, 4999])
def test_scores_that_rise_from_key_to_key(context: int) -> None:
    """Every tile has a new maximum, some so much larger that nothing before it counts."""
    case = PagedCase([1], [context], num_heads=9, num_kv_heads=3, head_size=64, block_size=16)
    positions = torch.arange(context + 1)
    rising = torch.linspace(0.0, 3.0, context + 1)[:, None] ** 4 * case.query[0, ::3, :].sign()[:, None]
    case.key_cache[case.block_tables[0, positions // 16].long(), :, positions % 16] += rising.transpose(0, 1)
    whole = attend_with(1, case)
    for threads in (2, 16):
        assert torch.equal(attend_cut(threads, case), whole)


def test_a_broken_key_makes_nan_and_one_that_is_not_there_nothing() -> None:
    case = PagedCase([1], [700], num_heads=3, num_kv_heads=1, head_size=32, block_size=16)
    beyond = case.block_tables[0, 700 // 16], slice(None), slice(700 % 16 + 1, None)
    expected = attend_cut(2, case)
    for cache in (case.key_cache, case.value_cache):
        cache[beyond] = float("nan")
    assert torch.equal(attend_cut(2, case), expected)
    case.key_cache[case.block_tables[0, 20], 0, 3] = float("nan")
    assert attend_cut(2, case).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context", [300, 1500])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(4, 1, 256), (8, 1, 64), (9, 3, 128), (9, 1, 64)])
def test_two_threads_have_the_bits_of_one(
    num_heads: int, num_kv_heads: int, head_size: int, context: int, dtype: torch.dtype
) -> None:
    """As a worker calls it, which cuts where that is quicker; 9 rows are too many to be used in place."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "block_size": 16}
    for lens in ([context], [200, 90, context]):
        case = PagedCase([1] * len(lens), lens, dtype=dtype, **sizes)
        assert torch.equal(attend_with(2, case), attend_with(1, case))
