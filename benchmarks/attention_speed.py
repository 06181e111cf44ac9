"""How fast attention of single tokens reads a cache on a CPU: `python -m benchmarks.attention_speed`.

Sequences of 200 tokens whose blocks lie anywhere, of the heads of three models. What a call reads, keys and values,
stands beside the bandwidth of as many threads, measured in the same run. Calls read one cache after the other, like the
layers of a model; together these are far more than the processor's caches hold. Medians over calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from benchmarks.machine_limits import MemoryReader
from kernels.cpu.attention import paged_attention
from octavo.bench import machine
from octavo.shared.cores import available_cores

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen3-0.6B": (16, 8, 128), "Llama-3.2-1B": (32, 8, 64)}  # heads, of keys, size
SEQ_LEN, BLOCK_SIZE = 200, 16
_BYTES = 256 << 20  # of all caches
_CALLS = 100  # or so many as there are caches


def gb_per_s(heads: tuple[int, int, int], dtype: torch.dtype, sequences: int) -> float:
    """Keys and values that calls read a second."""
    num_heads, num_kv_heads, size = heads
    num_blocks = -(-SEQ_LEN // BLOCK_SIZE)
    shape = (sequences * num_blocks, num_kv_heads, BLOCK_SIZE, size)
    num_caches = max(2, _BYTES // (2 * dtype.itemsize * torch.Size(shape).numel()))
    caches = [tuple(torch.randn(shape).to(dtype) for _ in range(2)) for _ in range(num_caches)]
    query = torch.randn(sequences, num_heads, size).to(dtype)
    block_tables = torch.randperm(shape[0]).int().view(sequences, num_blocks)
    seq_lens = torch.full((sequences,), SEQ_LEN, dtype=torch.int32)
    query_starts = torch.arange(sequences + 1, dtype=torch.int32)
    seconds = []
    for _ in range(max(1, _CALLS // num_caches)):
        for keys, values in caches:
            started = time.perf_counter()
            paged_attention(
                torch.empty_like(query),
                query,
                keys,
                values,
                block_tables,
                seq_lens,
                query_starts,
                scale=size**-0.5,
                max_query_len=1,
                max_seq_len=SEQ_LEN,
            )
            seconds.append(time.perf_counter() - started)
    return 2 * sequences * SEQ_LEN * num_kv_heads * size * dtype.itemsize / statistics.median(seconds) / 1e9


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    limit = MemoryReader(_BYTES, arguments.threads).gb_per_s()
    about = f"{time.strftime('%Y-%m-%d')}, {machine.describe()['cpu']}, {arguments.threads} threads"
    print(f"{about}: reads {limit:.1f} GB/s\n\n| heads of | cache | sequences | GB/s | of bandwidth |")
    print("| --- | --- | --- | --- | --- |")
    for name, heads in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for sequences in arguments.sequences:
                speed = gb_per_s(heads, dtype, sequences)
                kept_in = str(dtype).removeprefix("torch.")
                print(f"| {name} | {kept_in} | {sequences} | {speed:.1f} | {speed / limit:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
