"""The workloads of docs/measurements.md, in one run: `python -m benchmarks.readme_figures` (about ten minutes on two
cores). The README's figures are of `benchmarks.peers`.

Octavo over `LLM`, Octavo over `Generate` and `transformers` take turns on the same token ids, so that a machine that
slows down slows all of them; medians over rounds are shown and every round is kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks.served import PATIENT, over_generate, served, wait_until_ready
from benchmarks.turns import rotated
from octavo import LLM, Client, SamplingParams
from octavo.bench import machine, offline, workloads
from octavo.bench.figures import Figures, table
from octavo.models.resolve import resolve_model

RESULTS = Path(__file__).parent / "results"
_STARTED_WITHIN_S = 60.0
_BUSY_PHASES = ("cache_ops", "prepare", "forward", "sample")


def main() -> int:
    """Prints the report; keeps every round in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures the workloads of docs/measurements.md.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=tuple(workloads.WORKLOADS), default=list(workloads.WORKLOADS))
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()

    facts = machine.describe()
    starts = [_start_to_first_token(arguments.model) for _ in range(arguments.rounds)]
    rows, steps, agreement = _rounds(arguments)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": facts,
        "model": arguments.model,
        "starts": starts,
        "rounds": [row.as_dict() for row in rows],
        "steps": steps,
        "same_tokens_as_transformers": agreement,
    }
    if not arguments.no_results:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{result['date'][:10]}-{machine.slug(facts)}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}\n")
    print(report(facts, starts, rows, steps, agreement))
    return 0


# ---- Start ----------------------------------------------------------------------------------------------------------


def _start_to_first_token(model: str) -> dict[str, float]:
    """Seconds from starting the command to the first token of a short prompt, tried again until it comes."""
    started = time.monotonic()
    with served(model) as address, Client(address, retry=PATIENT) as client:
        stream = client.generate("The sea is", SamplingParams(temperature=0, max_tokens=2), timeout=_STARTED_WITHIN_S)
        next(stream)
        first_token_s = time.monotonic() - started
        stream.close()
    return {"first_token_s": first_token_s}


# ---- Workloads ------------------------------------------------------------------------------------------------------


def _rounds(arguments: argparse.Namespace) -> tuple[list[Figures], list[dict[str, Any]], dict[str, str]]:
    baseline = None
    if not arguments.without_transformers:
        from benchmarks.transformers_baseline import TransformersBaseline

        baseline = TransformersBaseline(resolve_model(arguments.model))
    rows: list[Figures] = []
    steps: list[dict[str, Any]] = []
    agreement: dict[str, str] = {}
    with served(arguments.model) as address, LLM(arguments.model, dtype="float32") as llm:
        vocab_size = llm.get_tokenizer().vocab_size
        warm_up = workloads.warm_up(vocab_size)
        offline.run(llm, warm_up)
        wait_until_ready(address)
        over_generate(address, warm_up)
        if baseline:
            baseline.run(warm_up)
        for number in range(arguments.rounds):
            for name in arguments.workloads:
                workload = workloads.make(name, vocab_size)
                token_ids: dict[str, list[list[int]]] = {}
                for way in rotated(["LLM", "Generate", *(["transformers"] if baseline else [])], number):
                    if way == "Generate":
                        rows.append(over_generate(address, workload))
                    elif way == "LLM":
                        before = llm.statistics()
                        row, token_ids[way] = offline.run(llm, workload)
                        rows.append(row)
                        steps.append({"workload": name, **step_costs(before, llm.statistics(), row.wall_s)})
                    elif baseline:
                        row, token_ids[way] = baseline.run(workload)
                        rows.append(row)
                if baseline:
                    pairs = list(zip(token_ids["LLM"], token_ids["transformers"], strict=True))
                    agreement[name] = f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)} requests"
                print(f"round {number + 1} of {arguments.rounds}: {name} done", file=sys.stderr)
    return rows, steps, agreement


def step_costs(before: dict[str, Any], after: dict[str, Any], wall_s: float) -> dict[str, float]:
    """Per step of one run: bytes on the wire and microseconds of each part; and the share of time that the split took.

    The worker is busy while it runs cache operations, prepares, computes and samples. All the rest of the wall time,
    its own decoding and encoding of messages included, is the price of having two processes.
    """
    num_steps = after["num_steps"] - before["num_steps"]

    def per_step(name: str) -> float:
        return float(after[name] - before[name]) / float(num_steps)

    busy_ns = sum(after["worker_ns"][phase] - before["worker_ns"][phase] for phase in _BUSY_PHASES)
    return {
        "num_steps": num_steps,
        "bytes_sent": per_step("bytes_sent"),
        "bytes_received": per_step("bytes_received"),
        **{f"{part}_us": per_step(f"{part}_ns") / 1e3 for part in ("schedule", "encode", "decode", "process", "wire")},
        "worker_busy_us": busy_ns / num_steps / 1e3,
        "share_outside_worker": 1 - busy_ns / 1e9 / wall_s,
    }


# ---- Report ---------------------------------------------------------------------------------------------------------


def report(
    facts: dict[str, Any],
    starts: Sequence[dict[str, float]],
    rows: Sequence[Figures],
    steps: Sequence[dict[str, Any]],
    agreement: dict[str, str],
) -> str:
    """Markdown: medians of `rows` by workload and engine, costs of steps, where tokens agree with `transformers`."""
    seconds = statistics.median(start["first_token_s"] for start in starts)
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB; torch {facts['packages'].get('torch')}",
        "",
        f"From `octavo serve` to the first token of a request: {seconds:.1f} s.",
        "",
        table(_medians(rows)),
        "",
        "| workload | steps | bytes a step, out / back | schedule + encode | decode + process | outside the worker |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(entry["workload"] for entry in steps):
        of_name = [entry for entry in steps if entry["workload"] == name]
        median = {key: statistics.median(entry[key] for entry in of_name) for key in of_name[0] if key != "workload"}
        lines.append(
            f"| {name} | {median['num_steps']:.0f} | {median['bytes_sent']:.0f} / {median['bytes_received']:.0f} "
            f"| {median['schedule_us'] + median['encode_us']:.0f} µs "
            f"| {median['decode_us'] + median['process_us']:.0f} µs | {100 * median['share_outside_worker']:.1f} % |"
        )
    if agreement:
        said = ", ".join(f"{name} {text}" for name, text in agreement.items())
        lines += ["", f"Same tokens as transformers: {said}."]
    return "\n".join(lines)


def _medians(rows: Sequence[Figures]) -> list[Figures]:
    """One row a workload and engine, each number the median over its rounds."""
    medians = []
    for key in dict.fromkeys((row.workload, row.over) for row in rows):
        same = [row for row in rows if (row.workload, row.over) == key]
        numbers = {
            field.name: statistics.median(getattr(row, field.name) for row in same)
            for field in fields(Figures)
            if field.name not in ("workload", "over", "streams")
        }
        medians.append(replace(same[0], **numbers))
    return medians


if __name__ == "__main__":
    sys.exit(main())
