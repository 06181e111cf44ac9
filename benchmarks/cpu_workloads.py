"""The workloads in float32 over `LLM`, with and without --batch-invariant and with weights that take 32 bits, W1 beside
the bandwidth that bounds it and W2 beside the products: `python -m benchmarks.cpu_workloads`.

The modes take turns in each round, each with a worker of its own, so that a machine that slows down slows all. One
request generates no token faster than its weights are read: a bound of W1 is the machine's bandwidth, measured in the
same round between the workers, over the bytes of all matrices. There are two: of the bytes that the matrices have as
float32, which a product over few bits may exceed, and of those that they are kept in, which nothing can. Many requests
are computed no faster than their products: a bound of W2 is the speed of the fastest large product, measured as well,
over the products that no engine can leave out. Medians are shown and every round is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine_limits
from octavo import LLM
from octavo.bench import machine, offline, workloads
from octavo.models.resolve import resolve_model
from octavo.shared.cores import available_cores
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import load_model

RESULTS = Path(__file__).parent / "results"
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "batch-invariant": {"batch_invariant": True},
    "32 bits": {"load_format": "dummy"},  # random weights: nothing of them can be left out
}

_OF_BANDWIDTH, _AS_KEPT, _OF_PRODUCTS = (f"bound_{of}tokens_per_s" for of in ("", "as_kept_", "of_products_"))
_WORKLOAD_OF = {_OF_BANDWIDTH: "W1", _AS_KEPT: "W1", _OF_PRODUCTS: "W2"}  # which each of them bounds


def main() -> int:
    """Prints the table; keeps every round in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures the workloads on a CPU and what --batch-invariant costs.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=tuple(workloads.WORKLOADS), default=list(workloads.WORKLOADS))
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    facts = machine.describe()
    rounds = [_round(arguments.model, arguments.workloads) for _ in range(arguments.rounds)]
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path = RESULTS / f"{date[:10]}-cpu-workloads-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"date": date, "machine": facts, "rounds": rounds}, indent=1) + "\n")
    print(_table(rounds, arguments.workloads))
    return 0


def _round(model: str, names: list[str]) -> dict[str, Any]:
    """Limits of the machine, the bound of W1, and tokens/s by mode and workload."""
    limits = machine_limits.measure(available_cores())
    as_float32, as_kept = _bytes_a_token(model)
    result: dict[str, Any] = {
        "limits": dataclasses.asdict(limits),
        "bytes_a_token": {"as_float32": as_float32, "as_kept": as_kept},
        _OF_BANDWIDTH: limits.read_gb_per_s * 1e9 / as_float32,
        _AS_KEPT: limits.read_gb_per_s * 1e9 / as_kept,
        _OF_PRODUCTS: _bound_of_products(model, as_float32, limits.gflop_per_s),
    }
    for mode, options in MODES.items():
        with LLM(model, dtype="float32", **options) as llm:
            vocab_size = llm.get_tokenizer().vocab_size
            offline.run(llm, workloads.warm_up(vocab_size))
            result[mode] = {
                name: offline.run(llm, workloads.make(name, vocab_size))[0].output_tokens_per_s for name in names
            }
        print(f"{mode}: {result[mode]}", file=sys.stderr)
    return result


def _bytes_a_token(model: str) -> tuple[int, int]:
    """Bytes of all matrices, each once, as float32 and as a worker keeps them; the embedding only as the head."""
    folder = resolve_model(model)
    config = ModelConfig.from_folder(folder, "float32")
    table = config.vocab_size * config.hidden_size * config.dtype.itemsize
    without_angles = dataclasses.replace(config, max_model_len=1)  # their tables are looked up in, not read
    return config.weights_bytes - table, load_model(folder, without_angles, "cpu").weights_bytes - table


def _bound_of_products(model: str, as_float32: int, gflop_per_s: float) -> float:
    """Output tokens/s of W2 by its products alone. Of a prompt only the last row needs the last layer, nearly, and the
    head; the token that was drawn last is not computed any more."""
    config = ModelConfig.from_folder(resolve_model(model), "float32")
    workload, head = workloads.make("W2", config.vocab_size), config.vocab_size * config.hidden_size
    layers, num_flops = as_float32 / config.dtype.itemsize - head, 0.0
    for request in workload.requests:
        num_left_out = len(request.prompt_token_ids) - 1
        num_rows = num_left_out + request.max_tokens
        num_flops += 2 * (num_rows * layers - num_left_out * layers / config.num_layers + request.max_tokens * head)
    return workload.num_output_tokens / (num_flops / gflop_per_s / 1e9)


def _table(rounds: list[dict[str, Any]], names: list[str]) -> str:
    lines = ["| workload | tokens/s | of bandwidth, as float32 | as kept | of products | batch-invariant | its cost "]
    lines[0] += "| weights of 32 bits | of bandwidth | of products |"
    lines.append("|" + " --- |" * 10)
    for name in names:
        default, invariant, whole = (statistics.median(one[mode][name] for one in rounds) for mode in MODES)
        cost = statistics.median(1 - one["batch-invariant"][name] / one["default"][name] for one in rounds)
        row = [name, f"{default:.1f}", *_shares(rounds, name, "default", _OF_BANDWIDTH, _AS_KEPT, _OF_PRODUCTS)]
        row += [f"{invariant:.1f}", f"{cost:.1%}", f"{whole:.1f}"]
        row += _shares(rounds, name, "32 bits", _OF_BANDWIDTH, _OF_PRODUCTS)
        lines.append(f"| {' | '.join(row)} |")
    sizes = " MB, ".join(f"{one / 1e6:.0f}" for one in rounds[0]["bytes_a_token"].values())
    return "\n".join([*lines, "", f"Matrices that a token reads, as float32 and as they are kept: {sizes} MB"])


def _shares(rounds: list[dict[str, Any]], name: str, mode: str, *bounds: str) -> list[str]:
    """Medians of tokens/s over each of the bounds; a dash for a bound of another workload."""
    return [
        f"{statistics.median(one[mode][name] / one[bound] for one in rounds):.2f}"
        if _WORKLOAD_OF[bound] == name
        else "-"
        for bound in bounds
    ]


if __name__ == "__main__":
    sys.exit(main())
