"""What is asked for before it is read: exactly the blocks of earlier tokens, and no result depends on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.cache_prefetch import CURSOR_SIZE, NONE, aim, blocks_before, last_level_bytes, next_lines
from kernels.cpu.registers import PANEL, STREAMED_ROWS, stream_add

LINE = 64
KEYS, VALUES = 1 << 30, 1 << 40
_BLOCK_BYTES = 48 << 10  # more than products below ask for


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
    lanes=st.integers(1, 4),
    block_bytes=st.sampled_from([16, 64, 96, 12_288]),
    most=st.integers(1, 200),
)
def test_lanes_ask_for_each_line_once(blocks: list[int], lanes: int, block_bytes: int, most: int) -> None:
    asked = asked_lines(blocks, lanes, block_bytes, most, room_bytes=1 << 30)
    lines = range(0, block_bytes, LINE)
    assert sorted(asked) == sorted(
        part + block * block_bytes + line for block in blocks for part in (KEYS, VALUES) for line in lines
    )


def test_no_more_is_asked_for_than_there_is_room_for() -> None:
    asked = asked_lines(list(range(10)), 2, 640, 7, room_bytes=2 * 2 * 2 * 640)
    first_of_lanes = (0, 1, 5, 6)
    assert {(address - KEYS) // 640 for address in asked if address < VALUES} == set(first_of_lanes)
    assert asked_lines(list(range(10)), 2, 640, 7, room_bytes=0) == []


def asked_lines(blocks: list[int], lanes: int, block_bytes: int, most: int, room_bytes: int) -> list[int]:
    """Addresses of the lines that all lanes ask for, one lane after the other."""
    numbers, asked = np.array(blocks, dtype=np.int64), []
    for lane in range(lanes):
        cursor = np.zeros(CURSOR_SIZE, dtype=np.int64)
        aim(cursor.ctypes.data, numbers, lane, lanes, KEYS, VALUES, block_bytes, room_bytes)
        count = 1
        while count > 0:
            address, count = next_lines(cursor.ctypes.data, most)
            assert count <= most
            asked += [address + i * LINE for i in range(count)]
    return asked


@pytest.mark.skipif(STREAMED_ROWS < 8, reason="this processor multiplies fewer rows at once, which ask for nothing")
@pytest.mark.parametrize("rows", [8, 19, 32])
def test_products_that_ask_have_the_same_bits(rows: int) -> None:
    depth, generator = 70, np.random.default_rng(0)
    x, panel, start = (
        generator.standard_normal(n, dtype=np.float32) for n in (rows * depth, depth * PANEL, rows * PANEL)
    )
    memory, blocks = np.ones(2 * _BLOCK_BYTES, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    cursor = np.zeros(CURSOR_SIZE, dtype=np.int64)
    aim(cursor.ctypes.data, blocks, 0, 1, memory.ctypes.data, memory.ctypes.data + _BLOCK_BYTES, _BLOCK_BYTES, 1 << 20)
    outs = []
    for where in (NONE, np.int64(cursor.ctypes.data)):
        out = np.zeros(rows * PANEL, dtype=np.float32)
        stream_add(rows, x, 0, depth, panel, 0, start, 0, PANEL, out, 0, PANEL, depth, 0, where)
        outs.append(out)
    assert outs[0].any()
    np.testing.assert_array_equal(outs[0], outs[1])
    whole_tiles = rows // STREAMED_ROWS
    address, _ = next_lines(cursor.ctypes.data, 1)
    assert address - memory.ctypes.data == whole_tiles * depth * LINE  # each of them asked for `depth` lines


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    for index, size in enumerate(["48K\n", "1024K\n", "32768K\n"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert last_level_bytes(tmp_path) == 32 << 20
    assert last_level_bytes(tmp_path / "nowhere") == 0
