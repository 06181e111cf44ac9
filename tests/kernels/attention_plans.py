"""Plans of paged attention as the device makes them: who is split, into what, and how many programs share the work."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gpu.attention.scratch import SEGMENT, SPAN
from kernels.gpu.attention.work import FIRST_LINE, NUM_FACTS, PIECE, TOKEN_END, WHOLE_END, plan_kernel
from tests.kernels.device import DEVICE

KEY_TILE, SPLIT_ROWS, WHOLE_ROWS = 64, 64, 128  # on Hopper


@dataclass(frozen=True)
class Planned:
    """One column a sequence."""

    piece: list[int]  # in segments; 0: whole
    first_line: list[int]
    token_end: list[int]
    whole_end: list[int]


def plan(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_lines: int,
    window: int = 0,
    group: int = 4,
    num_kv_heads: int = 8,
    num_multiprocessors: int = 132,
) -> Planned:
    """Of a Llama 3 8B on an H100, unless it is said otherwise."""
    columns = torch.empty(NUM_FACTS, len(seq_lens), dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    plan_kernel[(1,)](
        columns,
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        starts,
        len(seq_lens),
        num_kv_heads,
        num_lines,
        num_multiprocessors,
        window,
        GROUP=group,
        KEY_TILE=KEY_TILE,
        SPLIT_ROWS=SPLIT_ROWS,
        WHOLE_ROWS=WHOLE_ROWS,
        HAS_WINDOW=window > 0,
    )
    rows = (PIECE, FIRST_LINE, TOKEN_END, WHOLE_END)
    return Planned(*[columns[row.value].tolist() for row in rows])


@dataclass(frozen=True)
class Cost:
    """Of one sequence's attention in one layer."""

    items: int  # pieces of work that programs share, of all key/value heads
    longest: int  # of them, in keys
    cache_bytes: int  # keys and values that are read from memory: once for all tiles of rows of a piece
    sum_bytes: int  # that pieces leave and the joining kernel reads again


def cost(query_len: int, seq_len: int, num_lines: int, *, group: int = 4, num_kv_heads: int = 8) -> Cost:
    """Of `query_len` new tokens, counted from the plan; heads of 128 and a cache of 16 bits."""
    (piece,) = plan([query_len], [seq_len], num_lines=num_lines, group=group, num_kv_heads=num_kv_heads).piece
    cache_bytes = 2 * 2 * 128 * num_kv_heads * seq_len
    if piece == 0:
        tiles = -(-query_len * group // WHOLE_ROWS)
        return Cost(tiles * num_kv_heads, seq_len, cache_bytes, 0)
    keys = piece * SEGMENT
    pieces, tiles = -(-seq_len // keys), -(-query_len * group // SPLIT_ROWS)
    sums = pieces * query_len * group * num_kv_heads * (128 + 2) * 4
    return Cost(pieces * tiles * num_kv_heads, min(keys, seq_len), cache_bytes, 2 * sums)


__all__ = ["SEGMENT", "SPAN", "Cost", "Planned", "cost", "plan"]
