"""Conversations in the format of Mooncake's trace, made up: the trace itself is not ours to ship.

Published of its conversations: 12,031 requests in 3,537 s, 12,035 tokens in and 343 out on average, 37 % of the former
in blocks that an earlier request had; every prompt begins with the same block; arrivals fall on ticks of 3 s, up to 28
on one. Made alike here: a request has a follower with a chance of 0.365, whose prompt is all before, its answer and
more. Lengths are lognormal. What is not published (which turn follows after how long) is a guess.

    python -m benchmarks.mooncake_like --requests 12031 > trace.jsonl
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.fleet.traces import BLOCK_TOKENS

TICK_S = 3.0
REQUESTS_PER_S = 12_031 / 3_537
FOLLOWS = 0.365  # chance that a request has a follower
FIRST_TOKENS, MORE_TOKENS, OUTPUT_TOKENS = 10_300, 2_700, 343  # means: of a first prompt, of what a follower adds
SIGMA = 0.9  # of the logarithms of lengths
PAUSE_S = 45.0  # mean, from a request to its follower
LONGEST = 126_000


@dataclass(order=True, slots=True)
class _Turn:
    at_s: float
    number: int
    blocks: list[int] = field(compare=False)  # full ones that the turn before had
    num_tokens: int = field(compare=False)


def entries(num_requests: int, seed: int) -> Iterator[dict[str, Any]]:
    """Lines of a trace in order of arrival."""
    rng = random.Random(f"conversations/{seed}")
    ids, numbers = itertools.count(1), itertools.count()
    first_rate = REQUESTS_PER_S * (1 - FOLLOWS)
    to_come: list[_Turn] = []
    next_first_s = 0.0
    for _ in range(num_requests):
        while not to_come or next_first_s <= to_come[0].at_s:
            tokens = _length(rng, FIRST_TOKENS)
            heapq.heappush(to_come, _Turn(next_first_s, next(numbers), [0], tokens))
            next_first_s += rng.expovariate(first_rate)
        turn = heapq.heappop(to_come)
        num_blocks = -(-turn.num_tokens // BLOCK_TOKENS)
        blocks = turn.blocks[:num_blocks] + [next(ids) for _ in range(num_blocks - len(turn.blocks))]
        num_outputs = max(1, min(2_000, _length(rng, OUTPUT_TOKENS)))
        at_ms = int(turn.at_s // TICK_S * TICK_S * 1000)
        yield {
            "timestamp": at_ms,
            "input_length": turn.num_tokens,
            "output_length": num_outputs,
            "hash_ids": blocks,
        }
        num_tokens = turn.num_tokens + num_outputs + _length(rng, MORE_TOKENS)
        if rng.random() < FOLLOWS and num_tokens <= LONGEST:
            full = blocks[: turn.num_tokens // BLOCK_TOKENS] or [0]
            at_s = turn.at_s + rng.expovariate(1 / PAUSE_S)
            heapq.heappush(to_come, _Turn(at_s, next(numbers), full, num_tokens))


def _length(rng: random.Random, mean: float) -> int:
    return max(1, min(LONGEST, round(mean * rng.lognormvariate(-SIGMA * SIGMA / 2, SIGMA))))


def statistics(trace: list[dict[str, Any]]) -> dict[str, float]:
    """What is published of the trace, of this one."""
    seen: set[int] = set()
    num_tokens = num_reusable = 0
    on_tick: dict[int, int] = {}
    for entry in trace:
        blocks = entry["hash_ids"]
        num_found = next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        num_reusable += min(num_found * BLOCK_TOKENS, entry["input_length"])
        num_tokens += entry["input_length"]
        seen.update(blocks)
        on_tick[entry["timestamp"]] = on_tick.get(entry["timestamp"], 0) + 1
    return {
        "requests": len(trace),
        "seconds": (trace[-1]["timestamp"] - trace[0]["timestamp"]) / 1000,
        "tokens_in": num_tokens / len(trace),
        "tokens_out": sum(entry["output_length"] for entry in trace) / len(trace),
        "reusable": num_reusable / num_tokens,
        "at_once": max(on_tick.values()),
    }


def main() -> None:
    """A JSON line an entry to standard output, what they are on average to standard error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=12_031)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    trace = list(entries(arguments.requests, arguments.seed))
    for entry in trace:
        print(json.dumps(entry))
    print({name: round(value, 3) for name, value in statistics(trace).items()}, file=sys.stderr)


if __name__ == "__main__":
    main()
