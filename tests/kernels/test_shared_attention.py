"""How attention is cut for threads: by query heads where there are fewer other items than threads. No bit changes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.cpu import attention as attention_module
from kernels.cpu.library import library
from tests.kernels.cases import PagedCase
from tests.kernels.test_cpu_kernels import attend, check_found

THREADS = (1, 2, 3, 8)
ONE, MANY_KEYS, PROMPT, DECODES = ([1], [500]), ([1], [4300]), ([70], [30]), ([1] * 5, [200] * 5)
LATENT: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 1, "head_size": 576, "block_size": 16}
MQA: dict[str, Any] = {"num_heads": 71, "num_kv_heads": 1, "head_size": 64, "block_size": 16}
GROUPED: dict[str, Any] = {"num_heads": 14, "num_kv_heads": 2, "head_size": 10, "block_size": 4}


@contextmanager
def threads_of(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_items(case: PagedCase, threads: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """That so many threads share."""
    found: list[int] = []

    def count(attention: ctypes.Array[ctypes.c_char], _: int) -> None:
        found.append(library().count_attention_items(attention, threads))

    with monkeypatch.context() as patched:
        patched.setattr(attention_module, "library", lambda: SimpleNamespace(paged_attention=count))
        attend(case)
    return found[0]


@pytest.mark.parametrize(
    ("sizes", "lengths", "items"),
    [
        (LATENT, ONE, [1, 2, 2, 4]),  # 16 heads, 8 or 4 at a time: no fewer than are multiplied at once
        (MQA, ONE, [1, 2, 3, 6]),  # 36, 24 or 12 of 71
        (GROUPED, ONE, [2, 2, 4, 4]),  # two of 7 heads, or four of 4 and 3
        (LATENT, MANY_KEYS, [3, 3, 3, 6]),  # three segments
        (LATENT, DECODES, [5, 5, 5, 10]),
        (LATENT | {"num_heads": 2}, ONE, [1] * 4),
        (LATENT, ([0, 0], [5, 9]), [0] * 4),
        # Tiles of at most 512 rows: 32 tokens of 16 heads, 4 of 128, and one of more heads than that.
        (LATENT, PROMPT, [3, 3, 3, 6]),
        (LATENT | {"num_heads": 128}, PROMPT, [18] * 4),
        (LATENT | {"num_heads": 600, "head_size": 16}, ([3], [0]), [3, 3, 3, 9]),
    ],
)
def test_every_thread_gets_items_where_there_are_heads_for_it(
    sizes: dict[str, Any], lengths: tuple[list[int], list[int]], items: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = PagedCase(*lengths, **sizes)
    assert [count_items(case, threads, monkeypatch) for threads in THREADS] == items


def test_a_shared_prefix_of_many_heads_is_read_for_a_few_sequences_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PagedCase([1] * 10, [200] * 10, **LATENT | {"num_heads": 128, "head_size": 16})
    case.block_tables[:, :8] = case.block_tables[0, :8].clone()
    assert count_items(case, 1, monkeypatch) == 3  # of 4, 4 and 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_key_heads_that_take_turns_change_no_bit(dtype: torch.dtype) -> None:
    """Of many sequences, some of which share keys, have several segments or are prompts; eight heads at a time, or
    four, or one."""
    query_lens, context_lens = [1] * 9 + [40] + [1] * 14, [150, 40, 2300, 700, 90] * 4 + [300] * 4
    case = PagedCase(query_lens, context_lens, num_heads=24, num_kv_heads=12, head_size=32, block_size=16, dtype=dtype)
    case.block_tables[-4:, :8] = case.block_tables[-1, :8].clone()
    found = []
    for threads in (1, 8, 40):
        with threads_of(threads):
            found.append(attend(case))
    assert all(torch.equal(each, found[0]) for each in found[1:])
    check_found(case, found[0], {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [ONE, MANY_KEYS, PROMPT, DECODES], ids=["one", "many keys", "prompt", "decodes"])
@pytest.mark.parametrize("sizes", [LATENT, MQA, GROUPED], ids=["latent", "one head", "two heads"])
def test_a_result_has_the_same_bits_with_any_number_of_threads(
    sizes: dict[str, Any], lengths: tuple[list[int], list[int]], dtype: torch.dtype
) -> None:
    """The sequences of a batch share 64 keys."""
    case, generator = PagedCase(*lengths, **sizes, dtype=dtype), torch.Generator().manual_seed(1)
    shared = 64 // sizes["block_size"]
    case.block_tables[:, :shared] = case.block_tables[0, :shared].clone()
    of_heads = [torch.rand(sizes["num_heads"], generator=generator) for _ in range(2)]
    for options in ({}, {"alibi_slopes": of_heads[0], "sinks": of_heads[1]}):
        found = []
        for threads in THREADS:
            with threads_of(threads):
                found.append(attend(case, **options))
        assert all(torch.equal(each, found[0]) for each in found[1:])
        check_found(case, found[0], options)
