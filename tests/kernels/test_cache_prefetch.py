"""What is prefetched before it is read: exactly the blocks of earlier tokens, and no result depends on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from kernels.cpu.products.int4_linear import items_of_panels, multiply_panels
from kernels.cpu.products.int4_linear import num_prefetching_inputs as num_inputs_of_int4
from kernels.cpu.products.int4_tile import TILE_ROWS
from kernels.cpu.products.int8_linear import DOT_KIND
from kernels.cpu.products.int8_rows import items_of_rows, quantize_rows, rows_in, workspace_bytes
from kernels.cpu.products.packed_weight import pack
from kernels.cpu.products.streamed_panels import LEAST_PREFETCHING_ROWS, num_prefetching_inputs, stream_add
from kernels.cpu.shared_work import counters
from kernels.cpu.vectors.cache_prefetch import (
    NONE,
    PREFETCH_CURSOR_SIZE,
    WHOLE,
    blocks_before,
    last_level_bytes,
    new_places,
    next_lines,
    next_run,
    plan_prefetch,
)
from kernels.cpu.vectors.float_tile import PANEL, STREAMED_ROWS
from kernels.cpu.vectors.numbers import FLOAT32

LINE = 64
KEYS, VALUES = 1 << 30, 1 << 40
_BLOCK_BYTES = 48 << 10  # more than products below prefetch


@njit(nogil=True, cache=True)
def _multiply_int4(out, x, rows, num_in, num_out, packed, workspace, zeros, cursor):
    """A weight with minima and no bias, by one thread; all memory by its address."""
    team, quantized = (counters(1, 2), np.int64(0), np.int64(1)), rows_in(workspace, rows, num_in)
    quantize_rows(team, 0, items_of_rows(rows), (FLOAT32, x, num_in * 4, num_in, quantized))
    weight = packed, True, np.int64(0), zeros, num_out
    multiply_panels(team, 1, items_of_panels(num_out), (DOT_KIND, out, num_out * 4, quantized, weight, cursor))


def asked_blocks(tables: list[list[int]], lens: list[int], query_lens: list[int], block_size: int, window: int):
    numbers = torch.tensor(tables, dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    addresses = numbers.data_ptr(), numbers.stride(0), seq_lens.data_ptr(), starts.data_ptr()
    return blocks_before(*addresses, len(lens), block_size, window).tolist()


def test_blocks_of_tokens_before_the_step() -> None:
    tables = [[3, 1, 4], [5, 9, 2], [6, 7, 8]]
    # 33 tokens, the last of them new: two blocks of earlier ones. A whole prompt has none, a chunk those before it.
    assert asked_blocks(tables, [33, 20, 40], [1, 20, 20], 16, 0) == [3, 1, 6, 7]


def test_a_window_leaves_out_what_is_before_it() -> None:
    # Token 47 attends to 32..47: the 15 before it lie in the last block. With one more to blocks 1 and 4.
    assert asked_blocks([[3, 1, 4]], [48], [1], 16, 16) == [4]
    assert asked_blocks([[3, 1, 4]], [48], [1], 16, 17) == [1, 4]


def test_what_sequences_have_in_common_comes_once() -> None:
    assert asked_blocks([[3, 1, 4], [3, 1, 5]], [48, 48], [1, 1], 16, 0) == [3, 1, 4, 5]


@given(
    blocks=st.lists(st.integers(0, 1000), max_size=9),
    threads=st.integers(1, 4),
    block_bytes=st.sampled_from([16, 64, 96, 192, 12_288]),
    tile=st.integers(1, 700),
    num_inputs=st.integers(0, 20_000),
)
def test_threads_prefetch_each_line_once(
    blocks: list[int], threads: int, block_bytes: int, tile: int, num_inputs: int
) -> None:
    asked = prefetched_lines(blocks, threads, block_bytes, tile, num_inputs, budget_bytes=1 << 30)
    lines = range(0, block_bytes, LINE)
    assert sorted(asked) == sorted(
        part + block * block_bytes + line for block in blocks for part in (KEYS, VALUES) for line in lines
    )


def test_lines_are_asked_for_evenly_until_there_are_no_more() -> None:
    # 2 threads, 3 blocks of 2 x 6 lines each: 36 lines of a thread for 100 inputs.
    cursors, _places = planned(list(range(6)), 2, 6 * LINE, num_inputs=100)
    of_tiles = [next_lines(cursors[0].ctypes.data, 20)[-1] for _ in range(6)]
    assert of_tiles == [8, 8, 8, 8, 4, 0]


@given(
    blocks=st.lists(st.integers(0, 20), max_size=9),
    threads=st.integers(1, 4),
    block_bytes=st.sampled_from([16, 64, 96, 192, 12_288]),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    num_inputs=st.integers(0, 20_000),
)
def test_runs_of_threads_have_each_line_once(
    blocks: list[int], threads: int, block_bytes: int, sizes: list[int], num_inputs: int
) -> None:
    cursors, _places = planned(blocks, threads, block_bytes, num_inputs)
    asked: list[int] = []
    for thread, cursor in enumerate(cursors):
        share = len(blocks) * (thread + 1) // threads - len(blocks) * thread // threads
        num_left = share * 2 * -(-block_bytes // LINE)
        for number in range(100_000):
            address, count = next_run(cursor.ctypes.data, sizes[number % len(sizes)])
            assert count <= sizes[number % len(sizes)]
            asked += range(address, address + count * LINE, LINE)
            num_left -= count
            if num_left == 0:
                break
        assert num_left == 0 and next_run(cursor.ctypes.data, 1 << 20) == (0, 0)
    lines = range(0, block_bytes, LINE)
    assert sorted(asked) == sorted(
        part + block * block_bytes + line for block in blocks for part in (KEYS, VALUES) for line in lines
    )


def test_runs_wait_until_they_are_due() -> None:
    # 36 lines of a thread in runs of 6, for 100 inputs: ten of them are worth four lines.
    cursors, _places = planned(list(range(6)), 2, 6 * LINE, num_inputs=100)
    counts = [next_run(cursors[0].ctypes.data, 10)[1] for _ in range(10)]
    assert counts == [6, 6, 6, 0, 6, 6, 0, 6, 0, 0]


def test_no_more_is_asked_for_than_there_is_room_for() -> None:
    asked = prefetched_lines(list(range(10)), 2, 640, 7, 1000, budget_bytes=2 * 2 * 2 * 640)
    first_of_threads = (0, 1, 5, 6)
    assert {(address - KEYS) // 640 for address in asked if address < VALUES} == set(first_of_threads)
    assert prefetched_lines(list(range(10)), 2, 640, 7, 1000, budget_bytes=0) == []


def planned(
    blocks: list[int], threads: int, block_bytes: int, num_inputs: int, budget_bytes: int = 1 << 30, start: int = 0
):
    """A cursor for each thread, and what they point at, to be kept as long as they are used."""
    numbers = np.array(blocks, dtype=np.int64)
    cursors, places = np.zeros((threads, PREFETCH_CURSOR_SIZE), dtype=np.int64), new_places(numbers, block_bytes)
    keys, values = (start, start + block_bytes) if start else (KEYS, VALUES)
    for thread in range(threads):
        caches = keys, values, block_bytes
        plan_prefetch(cursors[thread].ctypes.data, places, numbers, thread, threads, *caches, budget_bytes, num_inputs)
    return cursors, places


def prefetched_lines(
    blocks: list[int], threads: int, block_bytes: int, tile: int, num_inputs: int, budget_bytes: int
) -> list[int]:
    """Addresses of the lines that all threads prefetch, one thread after the other, by tiles of so many inputs."""
    cursors, places = planned(blocks, threads, block_bytes, num_inputs, budget_bytes)
    first_place, asked = places.ctypes.data, []
    for cursor in cursors:
        count = 1
        while count > 0:
            address, shift, rate, first, count = next_lines(cursor.ctypes.data, tile)
            numbers = sorted({min(first + i * rate // WHOLE, first + count - 1) for i in range(tile)}) if count else []
            assert len(numbers) == count
            own = places[(address - first_place) // 8 :]
            asked += [int(own[number >> shift]) + number % (1 << shift) * LINE for number in numbers]
    return asked


@pytest.mark.skipif(STREAMED_ROWS < 8, reason="this processor multiplies fewer rows at once, which prefetch nothing")
@pytest.mark.parametrize("rows", [3, 4, 5, 6, 7, 8, 19, 20, 32])
def test_products_that_ask_have_the_same_bits(rows: int) -> None:
    depth, generator = 70, np.random.default_rng(0)
    x, panel, start = (
        generator.standard_normal(n, dtype=np.float32) for n in (rows * depth, depth * PANEL, rows * PANEL)
    )
    memory = np.ones(2 * _BLOCK_BYTES, dtype=np.uint8)
    num_tiles = rows // STREAMED_ROWS + (rows % STREAMED_ROWS >= LEAST_PREFETCHING_ROWS)
    cursors, _places = planned([0], 1, _BLOCK_BYTES, num_tiles * depth, start=memory.ctypes.data)
    outs = []
    for where in (NONE, np.int64(cursors[0].ctypes.data)):
        out = np.zeros(rows * PANEL, dtype=np.float32)
        stream_add(rows, x, 0, depth, panel, 0, start, 0, PANEL, out, 0, PANEL, depth, 0, where)
        outs.append(out)
    assert outs[0].any()
    np.testing.assert_array_equal(outs[0], outs[1])
    *_, first, _ = next_lines(cursors[0].ctypes.data, 1)
    assert first == num_tiles * depth, "an input prefetches one line, where there are more than inputs"


@pytest.mark.skipif(STREAMED_ROWS < 8, reason="this processor multiplies fewer rows at once, which prefetch nothing")
def test_the_first_tile_of_rows_is_not_counted_on() -> None:
    of_rows = {rows: num_prefetching_inputs(rows, 2 * 70 * PANEL) for rows in (1, 8, 11, 12, 16, 19, 32)}
    assert of_rows == {1: 0, 8: 0, 11: 0, 12: 140, 16: 140, 19: 140, 32: 420}


def test_int4_products_that_ask_have_the_same_bits() -> None:
    rows, num_out, num_in = 13, 2 * PANEL + 5, 96
    generator = torch.Generator().manual_seed(0)
    scale = (1 + torch.rand(num_out, num_in // 32, 1, generator=generator)).half().float()
    integers = torch.randint(0, 16, (num_out, num_in // 32, 32), generator=generator).float()
    integers[..., :2] = torch.tensor([0.0, 15.0])
    packed = pack((scale * integers - scale).view(num_out, num_in))
    x = torch.randn(rows, num_in, generator=generator)
    memory = np.ones(2 * _BLOCK_BYTES, dtype=np.uint8)
    num_inputs = num_inputs_of_int4(rows, num_out * num_in)
    cursors, _places = planned([0], 1, _BLOCK_BYTES, num_inputs, start=memory.ctypes.data)
    outs = []
    for where in (NONE, np.int64(cursors[0].ctypes.data)):
        out, zeros = torch.zeros(rows, num_out), torch.zeros(PANEL)
        workspace = torch.zeros(workspace_bytes(rows, num_in), dtype=torch.uint8)
        addresses = (tensor.data_ptr() for tensor in (packed, workspace, zeros))
        _multiply_int4(out.data_ptr(), x.data_ptr(), rows, num_in, num_out, *addresses, where)
        outs.append(out)
    assert outs[0].any() and torch.equal(outs[0], outs[1])
    num_panels, num_tiles, num_groups = 3, rows // TILE_ROWS - 1, num_in // 32
    assert (
        next_run(cursors[0].ctypes.data, 1)[0] == memory.ctypes.data + num_panels * num_tiles * num_groups * 16 * LINE
    )


def test_the_first_tile_of_rows_by_four_bits_is_not_counted_on() -> None:
    of_rows = {rows: num_inputs_of_int4(rows, 2 * 64 * PANEL) for rows in (1, 7, 8, 11, 12, 32)}
    assert of_rows == {1: 0, 7: 0, 8: 64, 11: 64, 12: 128, 32: 448}


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    for index, size in enumerate(["48K\n", "1024K\n", "32768K\n"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert last_level_bytes(tmp_path) == 32 << 20
    assert last_level_bytes(tmp_path / "nowhere") == 0
