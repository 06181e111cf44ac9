"""Octavo beside other engines on the same token ids: `python -m benchmarks.peers --environments FOLDER`.

Each engine lives in a virtual environment of its own (`--how-to-install` prints the commands) and is one process that
answers workloads over its pipes (`benchmarks/peer_engines/`). Engines with weights of one type are loaded together, and
take turns, workload by workload and round by round. The others are stopped meanwhile, so that no spinning thread of one
costs another. A round has token ids of its own, so that no engine finds a prompt in its cache. What is not installed is
left out, by name.

`--model` may be a folder that `benchmarks.made_models` wrote. Each engine runs as its users would run it: but for
float32, OpenVINO takes the types of rows and cache that it prefers on the processor.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peer_engine import ENGINES, TYPES, EngineFailed, PeerEngine
from octavo.bench import machine, workloads
from octavo.models.resolve import resolve_model

RESULTS = Path(__file__).parent / "results"
ORACLES = ("transformers", "octavo")  # whose greedy tokens count as right: the first of them that runs


def main() -> int:
    """Prints the table; keeps every round in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Runs the same token ids through Octavo and other engines, in turns.")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="folder of the virtual environments")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES), help="of weights")
    parser.add_argument("--workloads", nargs="+", choices=tuple(workloads.WORKLOADS), default=list(workloads.WORKLOADS))
    parser.add_argument("--rounds", type=int, nargs="+", default=[3], metavar="N", help="of all workloads, or of each")
    parser.add_argument("--no-results", action="store_true", help="print only")
    parser.add_argument("--how-to-install", action="store_true", help="print the commands and end")
    arguments = parser.parse_args()
    if arguments.how_to_install:
        print("\n\n".join(_instructions(arguments.engines)))
        return 0
    if arguments.environments is None:
        parser.error("--environments is needed: the folder that --how-to-install speaks of")
    if len(arguments.rounds) not in (1, len(arguments.workloads)):
        parser.error("--rounds is one number, or one for each of --workloads")

    facts = machine.describe()
    folder = resolve_model(arguments.model)
    rows = _measure(arguments, folder)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": facts,
        "model": folder.name,
        **rows,
    }
    if not arguments.no_results:
        path = RESULTS / f"{result['date'][:10]}-peers-{folder.name}-{machine.slug(facts)}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}\n")
    print(report(rows))
    return 0


def _instructions(names: Sequence[str]) -> Iterator[str]:
    shown = set()
    for name in names:
        how = ENGINES[name].how_to_install
        if how and how not in shown:
            shown.add(how)
            yield f"# {name}\n{how}"


# ---- Measuring ------------------------------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`engines`: what each said of itself; `runs`: one entry a round, workload and engine."""
    rows: dict[str, Any] = {"engines": {}, "runs": []}
    right: dict[tuple[int, str], tuple[str, list[list[int]]]] = {}
    for type_ in arguments.types:
        with ExitStack() as stack:
            of_type = [name for name in arguments.engines if ENGINES[name].type == type_]
            running = dict(_start(of_type, arguments.environments, folder, stack, rows["engines"]))
            vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
            rounds = dict(zip(arguments.workloads, itertools.cycle(arguments.rounds), strict=False))
            for number in range(max(arguments.rounds)):
                for workload_name in (name for name in arguments.workloads if number < rounds[name]):
                    workload = workloads.make(workload_name, vocab_size, seed=workloads.SEED + number)
                    rows["runs"] += _one_round(running, workload, number, right)
            for name, engine in running.items():
                rows["engines"][name]["peak_gib"] = engine.peak_bytes / 2**30
    return rows


def _start(
    names: Sequence[str], environments: Path, folder: Path, stack: ExitStack, engines: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, PeerEngine]]:
    """Those that start, warm and paused; what each says of itself goes to `engines`."""
    for name in names:
        kind = ENGINES[name]
        if (missing := kind.missing(environments, folder)) is not None:
            engines[name] = {"missing": missing}
            print(f"{name}: not here, {missing}", file=sys.stderr)
            continue
        try:
            engine = stack.enter_context(PeerEngine(kind, environments, folder))
            engine.run(workloads.warm_up(1000))
        except EngineFailed as error:
            engines[name] = {"failed": str(error)}
            print(f"{name}: {error}", file=sys.stderr)
            continue
        engine.pause()
        engines[name] = {"version": engine.version, "type": kind.type, "ready_s": engine.ready_s}
        print(f"{name}: {engine.version}, ready after {engine.ready_s:.1f} s", file=sys.stderr)
        yield name, engine


def _one_round(
    running: dict[str, PeerEngine],
    workload: workloads.Workload,
    number: int,
    right: dict[tuple[int, str], tuple[str, list[list[int]]]],
) -> list[dict[str, Any]]:
    """Every engine once on these ids; how many of its requests have the oracle's tokens, which `right` keeps."""
    rows, token_ids = [], {}
    for name, engine in running.items():
        row: dict[str, Any] = {"round": number, "workload": workload.name, "engine": name}
        engine.resume()
        try:
            wall_s, token_ids[name] = engine.run(workload)
            row |= {"wall_s": wall_s, "tokens_per_s": workload.num_output_tokens / wall_s}
        except EngineFailed as error:
            row["failed"] = str(error)
        engine.pause()
        rows.append(row)
        print(f"round {number + 1}, {workload.name}, {name}: {row.get('tokens_per_s', 'failed')}", file=sys.stderr)
    place = number, workload.name
    if place not in right and (oracle := next((name for name in ORACLES if name in token_ids), None)):
        right[place] = oracle, token_ids[oracle]
    for row in rows:
        if place in right and row["engine"] in token_ids:
            oracle, expected = right[place]
            pairs = zip(token_ids[row["engine"]], expected, strict=True)
            row["same_requests"] = sum(mine == theirs for mine, theirs in pairs)
            row |= {"num_requests": len(workload.requests), "oracle": oracle}
    return rows


# ---- Report ---------------------------------------------------------------------------------------------------------


def report(rows: dict[str, Any]) -> str:
    """Tokens/s as medians, and of each of ours the ratio to the best of the others: median and range over rounds."""
    names = sorted({run["workload"] for run in rows["runs"]})
    oracle = next((run["oracle"] for run in rows["runs"] if "oracle" in run), "nobody")
    lines = [f"| engine | {' | '.join(f'{name}, tokens/s' for name in names)} | tokens of {oracle} | ready | memory |"]
    lines.append("| --- " * (len(names) + 4) + "|")
    for engine, facts in rows["engines"].items():
        if "ready_s" not in facts:
            continue
        medians = [_median(speeds(rows, engine, name).values()) for name in names]
        runs = [run for run in rows["runs"] if run["engine"] == engine and "same_requests" in run]
        same = f"{sum(run['same_requests'] for run in runs)} of {sum(run['num_requests'] for run in runs)}"
        ready = f"{facts['ready_s']:.1f} s | {facts['peak_gib']:.2f} GiB"
        lines.append(f"| {engine} | {' | '.join(medians)} | {same} | {ready} |")
    lines.append("")
    for engine in filter(is_ours, rows["engines"]):
        for name in names:
            lines += _ratio(rows, engine, name)
    return "\n".join(lines)


def is_ours(engine: str) -> bool:
    """Whether it is Octavo, with weights of some type."""
    return engine.startswith("octavo")


def _ratio(rows: dict[str, Any], engine: str, workload: str) -> list[str]:
    """One line: this engine against the best other with weights of its type."""
    if (found := best_other(rows, engine, workload)) is None:
        return []
    best, ratios = found
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return [f"{workload}: {engine} / {best} = {statistics.median(ratios):.2f} ({spread} over {len(ratios)} rounds)"]


def best_other(rows: dict[str, Any], engine: str, workload: str) -> tuple[str, list[float]] | None:
    """The engine of another kind with weights of the same type that is fastest, by medians, and how many times as fast
    as it `engine` was, by rounds; None where one of the two has no figure."""
    type_ = ENGINES[engine].type
    others = [name for name in rows["engines"] if not is_ours(name) and ENGINES[name].type == type_]
    found = {name: of for name in others if (of := speeds(rows, name, workload))}
    mine = speeds(rows, engine, workload)
    if not found or not mine:
        return None
    best = max(found, key=lambda name: statistics.median(found[name].values()))
    ratios = [mine[number] / found[best][number] for number in mine if number in found[best]]
    return (best, ratios) if ratios else None


def speeds(rows: dict[str, Any], engine: str, workload: str) -> dict[int, float]:
    """Tokens/s by round."""
    return {
        run["round"]: run["tokens_per_s"]
        for run in rows["runs"]
        if run["engine"] == engine and run["workload"] == workload and "tokens_per_s" in run
    }


def _median(values: Any) -> str:
    numbers = list(values)
    return f"{statistics.median(numbers):.0f}" if numbers else "failed"


if __name__ == "__main__":
    raise SystemExit(main())
