"""What a frontend's choice among shards costs in processor time, memory and bytes: `python -m benchmarks.shard_choice`.

The real table, bits and messages, for as many as 1,000 workers in shards of 25, without processes around them. Each
worker's cache is full. One prompt in two has a beginning of 64 blocks that some worker has, and one in ten of these a
beginning that all have. Bytes are those that one frontend gets in a second, of reports 10 times a second in which every
worker's load has changed and its cache has taken so many blocks and given up as many.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench import machine
from octavo.bench.figures import percentile
from protos import shards_pb2
from scheduler_svc.shards.cached_bits import CachedBits
from scheduler_svc.shards.routing_table import LOAD_NAMES, REPORTED_NAMES, KnownWorker, RoutingTable, Wanted
from scheduler_svc.shards.shard_reporter import INTERVAL_S

BLOCK_SIZE, WORKERS_A_SHARD = 16, 25
PROMPT_BLOCKS, SHARED_BLOCKS = 96, 64
WARM_UP = 40  # choices that are not timed
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Prints a row a number of workers; with --save keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures the choice among shards.")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--blocks", type=int, default=20_000, help="of each worker's cache")
    parser.add_argument("--blocks-per-s", type=float, default=200.0, help="that a worker takes into its cache")
    parser.add_argument("--choices", type=int, default=400)
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    arguments = parser.parse_args()
    facts = machine.describe()
    print("workers shards  CPU us a choice: p50    p99  MB of bits  MB/s of reports  blocks too many a prompt")
    figures = []
    for num_workers in arguments.workers:
        figure = measure(num_workers, arguments.blocks, arguments.blocks_per_s, arguments.choices)
        figures.append(figure)
        print(
            f"{num_workers:>7} {figure['shards']:>6} {figure['choice_us_p50']:>17.0f} {figure['choice_us_p99']:>6.0f}"
            f" {figure['bits_mb']:>11.1f} {figure['report_mb_per_s']:>16.2f} {figure['blocks_too_many']:>25.3f}",
            flush=True,
        )
    if arguments.save:
        options = {"blocks_a_worker": arguments.blocks, "blocks_per_s_a_worker": arguments.blocks_per_s}
        path = RESULTS / f"{time.strftime('%Y-%m-%d')}-shard-choice-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"machine": facts, "options": options, "figures": figures}, indent=1) + "\n")
        print(f"kept in {path}")
    return 0


def measure(num_workers: int, num_blocks: int, blocks_per_s: float, num_choices: int) -> dict[str, Any]:
    """Figures for a pool of equal workers."""
    rng = np.random.default_rng(1)
    of_all = _hashes(rng, SHARED_BLOCKS)
    of_worker = [_hashes(rng, SHARED_BLOCKS) for _ in range(num_workers)]
    table, num_bits = RoutingTable(), 0
    for first in range(0, num_workers, WORKERS_A_SHARD):
        members = {}
        for number in range(first, min(first + WORKERS_A_SHARD, num_workers)):
            bits = CachedBits(num_blocks)
            others = _hashes(rng, num_blocks - 2 * SHARED_BLOCKS)
            bits.change([*of_all, *of_worker[number], *others], [])
            packed = np.frombuffer(bits.snapshot(), np.uint8)
            most = num_blocks * BLOCK_SIZE
            members[number] = KnownWorker("m", BLOCK_SIZE, most, most, False, bits.num_bits, packed)
            num_bits += bits.num_bits
        table.set_workers(first // WORKERS_A_SHARD, members, members)
        for number in members:
            table.report(first // WORKERS_A_SHARD, number, _load(rng))
    shards = range(-(-num_workers // WORKERS_A_SHARD))
    times_ns, too_many = [], []
    for choice_number in range(num_choices):
        shared = choice_number % 2 == 0
        begin = of_all if choice_number % 20 == 0 else of_worker[int(rng.integers(num_workers))]
        prompt = [*(begin if shared else []), *_hashes(rng, PROMPT_BLOCKS - shared * SHARED_BLOCKS)]
        places = np.frombuffer(b"".join(digest[:4] for digest in prompt), "<u4").astype(np.uint32)
        num_tokens = len(prompt) * BLOCK_SIZE + 1
        wanted = Wanted("m", num_tokens, num_tokens + 128, num_tokens + 128, 1, False, lambda *_, p=places: p)
        started_ns = time.thread_time_ns()
        choice = table.choose(wanted, shards)
        if choice_number >= WARM_UP:
            times_ns.append(time.thread_time_ns() - started_ns)
        assert choice is not None
        has_it = shared and (begin is of_all or begin is of_worker[choice.number])
        too_many.append(len(prompt) - (choice.num_uncached - 1) / BLOCK_SIZE - SHARED_BLOCKS * has_it)
    return {
        "workers": num_workers,
        "shards": len(shards),
        "choice_us_p50": round(percentile(times_ns, 50) / 1e3, 1),
        "choice_us_p99": round(percentile(times_ns, 99) / 1e3, 1),
        "bits_mb": round(num_bits / 8e6, 2),
        "report_mb_per_s": round(_report_bytes(rng, num_workers, blocks_per_s) / INTERVAL_S / 1e6, 3),
        "blocks_too_many": round(float(np.mean(too_many)), 4),
    }


def _report_bytes(rng: np.random.Generator, num_workers: int, blocks_per_s: float) -> int:
    changed = b"\0" * (4 * int(blocks_per_s * INTERVAL_S))
    report = shards_pb2.ShardReport(last_number=1)
    for number in range(num_workers):
        load = _load(rng)
        report.workers.add(
            number=number,
            load=shards_pb2.RoutingLoad(**{name: load[name] for name in LOAD_NAMES}),
            num_ahead_tokens=load["num_ahead_tokens"],
            num_ahead_slots=load["num_ahead_slots"],
            num_cached_blocks=20_000,
            num_outputs=128,
            set_bits_u32=changed,
            cleared_bits_u32=changed,
        )
    return report.ByteSize()


def _load(rng: np.random.Generator) -> dict[str, float]:
    load = dict.fromkeys(REPORTED_NAMES, 1.0)
    load |= {"tokens_per_s": 8000.0, "num_slots": 256.0, "num_blocks": 20_000.0, "block_size": BLOCK_SIZE}
    return load | {"num_ahead_tokens": float(rng.integers(0, 4000)), "num_taken_slots": float(rng.integers(0, 200))}


def _hashes(rng: np.random.Generator, count: int) -> list[bytes]:
    data = rng.bytes(32 * count)
    return [data[start : start + 32] for start in range(0, len(data), 32)]


if __name__ == "__main__":
    sys.exit(main())
