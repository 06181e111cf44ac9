"""How long sampling takes, after the model: `python -m benchmarks.sampler` (256 rows, vocabulary 128,256).

Every kind of row alone, and all of them mixed, each row with parameters of its own. What is timed is what a worker does
with the logits of a step: `LogitAdjustments.apply`, then `sample`. Medians of `--rounds` are shown, of the wall time,
or with `--cpu-time` of the one thread's own time, which neighbours on the machine hardly change.
Counts of penalties follow their sequences as in service: each round the sequences are one token longer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.bench import machine
from protos import inference_pb2, worker_pb2
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.sampling.logit_adjustments import LogitAdjustments
from worker_svc.sampling.sampler import Draws, sample

RESULTS = Path(__file__).parent / "results"
_PROMPT_TOKENS, _GENERATED_TOKENS = 200, 100
_LOGIT_SCALE = 3.0  # standard deviation

Parameters = Callable[[random.Random], dict[str, Any]]


def _bias(numbers: random.Random) -> dict[str, Any]:
    return {"logit_bias": {numbers.randrange(1000): numbers.uniform(-5, 5) for _ in range(8)}}


def _penalties(numbers: random.Random) -> dict[str, Any]:
    return {
        "repetition_penalty": numbers.uniform(1.01, 1.5),
        "frequency_penalty": numbers.uniform(0.1, 1),
        "presence_penalty": numbers.uniform(0.1, 1),
    }


def _filters(numbers: random.Random) -> dict[str, Any]:
    return {"top_k": numbers.randint(5, 200), "top_p": numbers.uniform(0.5, 0.99), "min_p": numbers.uniform(0, 0.1)}


KINDS: dict[str, Parameters] = {
    "greedy": lambda numbers: {"temperature": 0.0},
    "temperature": lambda numbers: {"temperature": numbers.uniform(0.5, 1.5)},
    "min-p": lambda numbers: {"min_p": numbers.uniform(0.01, 0.2)},
    "top-k": lambda numbers: {"top_k": numbers.randint(5, 200)},
    "top-p": lambda numbers: {"top_p": numbers.uniform(0.5, 0.99)},
    "top-k, top-p and min-p": _filters,
    "bias": _bias,
    "penalties": _penalties,
    "penalties, filters and bias": lambda numbers: _penalties(numbers) | _filters(numbers) | _bias(numbers),
    "greedy with 5 logprobs": lambda numbers: {"temperature": 0.0, "logprobs": 5},
}


def _mixed(numbers: random.Random) -> dict[str, Any]:
    return KINDS[numbers.choice(list(KINDS))](numbers)


class Batch:
    """Sequences of one kind, in a mirror of their own."""

    def __init__(self, kind: Parameters, rows: int, vocab_size: int, rounds: int) -> None:
        numbers = random.Random(0)
        length = _PROMPT_TOKENS + _GENERATED_TOKENS
        self._states = SequenceStates(rows, length + rounds + 2, 4, 4)
        step = worker_pb2.Step(step_id=1)
        for slot in range(rows):
            params = inference_pb2.SamplingParams(seed=slot, **kind(numbers))
            group = step.groups.add(request_id=str(slot), num_prompt_tokens=_PROMPT_TOKENS, sampling_params=params)
            group.sequences.add(slot=slot, token_ids=numbers.choices(range(vocab_size), k=length))
        self._states.apply_blocks(step)
        self._adjustments = LogitAdjustments(vocab_size)
        self._slots = np.arange(rows)

    def time_ns(self, logits: torch.Tensor, clock_ns: Callable[[], int]) -> tuple[int, int]:
        """Times of adjusting and of sampling; every sequence gets the token that was drawn."""
        states, slots = self._states, self._slots
        logits = logits.clone()  # a worker's are of one step
        keeps_logits = states.sampling.wants_raw_logits(slots)
        started_ns = clock_ns()
        adjusted = self._adjustments.apply(logits, states, slots, keeps_logits=keeps_logits)
        adjusted_ns = clock_ns()
        draws = Draws(slots, np.zeros(len(slots), np.int64), states.num_tokens[slots].astype(np.int64))
        sampled = sample(adjusted, states.sampling.take(slots), draws, logits)
        ended_ns = clock_ns()
        states.token_ids[slots, states.num_tokens[slots]] = sampled.token_ids
        states.num_tokens[slots] += 1
        return adjusted_ns - started_ns, ended_ns - adjusted_ns


def main() -> int:
    """Prints microseconds by kind of row; keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures adjusting logits and sampling.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--cpu-time", action="store_true", help="time of the thread, of which there is then one")
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    if arguments.cpu_time or arguments.threads:
        torch.set_num_threads(1 if arguments.cpu_time else arguments.threads)
    clock_ns = time.thread_time_ns if arguments.cpu_time else time.perf_counter_ns
    facts = machine.describe()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(arguments.rows, arguments.vocab_size, generator=generator) * _LOGIT_SCALE
    rows = [
        _measure(name, kind, logits, arguments.rounds, clock_ns) for name, kind in {**KINDS, "mixed": _mixed}.items()
    ]
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        result = {
            "date": date,
            "machine": facts,
            "threads": torch.get_num_threads(),
            "clock": "thread" if arguments.cpu_time else "wall",
            "rows": arguments.rows,
            "vocab_size": arguments.vocab_size,
            "rounds": arguments.rounds,
            "kinds": rows,
        }
        path = RESULTS / f"{date[:10]}-sampler-{machine.slug(facts)}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{arguments.rows} rows, vocabulary {arguments.vocab_size:,}, {torch.get_num_threads()} threads")
    print("| rows | adjust | sample | both | a row |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        both_ms = row["adjust_ms"] + row["sample_ms"]
        print(
            f"| {row['kind']} | {row['adjust_ms']:.0f} ms | {row['sample_ms']:.0f} ms | {both_ms:.0f} ms "
            f"| {1000 * both_ms / arguments.rows:.0f} µs |"
        )
    return 0


def _measure(
    name: str, kind: Parameters, logits: torch.Tensor, rounds: int, clock_ns: Callable[[], int]
) -> dict[str, Any]:
    batch = Batch(kind, logits.shape[0], logits.shape[1], rounds)
    batch.time_ns(logits, clock_ns)  # counts all tokens again; in service once a sequence
    times_ns = [batch.time_ns(logits, clock_ns) for _ in range(rounds)]
    adjust_ms, sample_ms = (statistics.median(column) / 1e6 for column in zip(*times_ns, strict=True))
    return {"kind": name, "adjust_ms": round(adjust_ms, 2), "sample_ms": round(sample_ms, 2)}


if __name__ == "__main__":
    sys.exit(main())
