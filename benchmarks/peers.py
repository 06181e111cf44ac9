"""Octavo beside other engines on the same token ids: `python -m benchmarks.peers --environments FOLDER`.

Each engine lives in a virtual environment of its own (`--how-to-install` prints the commands) and is one process that
answers workloads over its pipes (`benchmarks/peer_engines/`). Engines with weights of one type are loaded together, and
take turns, workload by workload and round by round, and each round begins with another of them. The others are stopped
meanwhile, so that no spinning thread of one costs another. Where memory does not hold them together, `--one-by-one`
starts each anew for every round. A round has token ids of its own, so that no engine finds a prompt in its cache. What
is not installed is left out, by name.

Before and after the turn of an engine with a request that is alone, this process measures how fast memory is read, by
as many threads and over as many bytes as the engine's weights, up to 512 MB. Another prompt then shows how long the
prompt took. So the tokens behind the first have a bound of the same minute: reading all weights once each.

`--model` may be a folder that `benchmarks.made_models` wrote. Each engine runs as its users would run it: but for
float32, OpenVINO takes the types of rows and cache that it prefers on the processor. `--instructions` limits all to a
set of instructions; results of that lie in files of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from benchmarks.instruction_sets import SETS
from benchmarks.machine_limits import MemoryReader
from benchmarks.peer_engine import EngineFailed, PeerEngine
from benchmarks.peer_figures import report
from benchmarks.peer_kinds import ENGINES, TYPES
from benchmarks.turns import rotated
from octavo.bench import machine, workloads
from octavo.models.resolve import resolve_model
from octavo.shared.cores import available_cores

RESULTS = Path(__file__).parent / "results"
ORACLES = ("transformers", "octavo")  # whose greedy tokens count as right: the first of them that runs
_MOST_READ_BYTES = 512 << 20  # many times the caches: more bytes are read as fast
_TokenIds = dict[tuple[int, str], dict[str, list[list[int]]]]  # by round and workload, then engine, of each request


def main() -> int:
    """Prints the table; keeps every round in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Runs the same token ids through Octavo and other engines, in turns.")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="folder of the virtual environments")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES), help="of weights")
    parser.add_argument("--workloads", nargs="+", choices=tuple(workloads.WORKLOADS), default=list(workloads.WORKLOADS))
    parser.add_argument("--rounds", type=int, nargs="+", default=[3], metavar="N", help="of all workloads, or of each")
    parser.add_argument("--one-by-one", action="store_true", help="load one engine at a time")
    parser.add_argument("--instructions", choices=tuple(SETS), help="of all engines (default: the processor's)")
    parser.add_argument("--add", action="store_true", help="keep this machine's results of other workloads and types")
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
    if arguments.instructions and (lacking := SETS[arguments.instructions].lacking()):
        parser.error(f"--instructions {arguments.instructions}: this processor has no {', '.join(lacking)}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # paused engines are let go
    facts = machine.describe()
    folder = resolve_model(arguments.model)
    rows = _measure(arguments, folder)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": facts,
        "model": folder.name,
        "instructions": arguments.instructions,
        "limited_by": SETS[arguments.instructions].variables() if arguments.instructions else {},
        "one_by_one": arguments.one_by_one,
        **rows,
    }
    if not arguments.no_results:
        kind = f"peers-{arguments.instructions}" if arguments.instructions else "peers"
        name = f"{kind}-{folder.name}-{machine.slug(facts)}.json"
        path = RESULTS / f"{result['date'][:10]}-{name}"
        before = max(RESULTS.glob(f"????-??-??-{name}"), default=None)
        if arguments.add and before is not None:
            result |= added(json.loads(before.read_text()), rows)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}\n")
    print(report(rows))
    return 0


def added(before: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Results with those from before of workloads and types of weights that were not run again: who is compared ran in
    turns. Runs from before say their day."""

    def ran(run: dict[str, Any]) -> tuple[str, str]:
        return run["workload"], ENGINES[run["engine"]].type

    again = {ran(run) for run in rows["runs"]}
    measured = {name: facts for name, facts in rows["engines"].items() if "ready_s" in facts}
    engines = rows["engines"] | before["engines"] | measured
    for name, facts in engines.items():
        peaks = [of["engines"].get(name, {}).get("peak_gib", 0.0) for of in (before, rows)]
        engines[name] = facts | {"peak_gib": max(peaks)}
    engines = {name: engines[name] for name in ENGINES if name in engines}
    kept = [{"day": before["date"][:10]} | run for run in before["runs"] if ran(run) not in again]
    return {"engines": engines, "runs": kept + rows["runs"]}


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
    token_ids: _TokenIds = {}
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    rounds = dict(zip(arguments.workloads, itertools.cycle(arguments.rounds), strict=False))
    reader = MemoryReader(_MOST_READ_BYTES, available_cores())
    for type_ in arguments.types:
        of_type = [name for name in arguments.engines if ENGINES[name].type == type_]
        for names, numbers in sittings(of_type, max(arguments.rounds), arguments.one_by_one):
            with ExitStack() as stack:
                running = dict(_start(names, arguments, folder, stack, rows["engines"]))
                for number in numbers:
                    for workload_name in (name for name in arguments.workloads if number < rounds[name]):
                        workload = workloads.make(workload_name, vocab_size, seed=workloads.SEED + number)
                        turns = _Turns(workload, vocab_size, number, reader, rows["engines"])
                        rows["runs"] += turns.take(running, token_ids)
                for name, engine in running.items():
                    facts = rows["engines"][name]
                    facts["peak_gib"] = max(facts.get("peak_gib", 0.0), engine.peak_bytes / 2**30)
    compare(rows["runs"], token_ids)
    return rows


def sittings(names: Sequence[str], num_rounds: int, one_by_one: bool) -> list[tuple[list[str], list[int]]]:
    """Engines that are loaded together, and the rounds that they run then."""
    if not one_by_one:
        return [(list(names), list(range(num_rounds)))]
    return [([name], [number]) for number in range(num_rounds) for name in rotated(names, number)]


def _start(
    names: Sequence[str],
    arguments: argparse.Namespace,
    folder: Path,
    stack: ExitStack,
    engines: dict[str, dict[str, Any]],
) -> Iterator[tuple[str, PeerEngine]]:
    """Those that start, warm and paused; what each says of itself goes to `engines`."""
    limits = SETS[arguments.instructions] if arguments.instructions else None
    for name in names:
        kind = ENGINES[name]
        if (missing := kind.missing(arguments.environments, folder, limits)) is not None:
            engines[name] = {"missing": missing}
            print(f"{name}: not here, {missing}", file=sys.stderr)
            continue
        variables, known = kind.variables(arguments.environments, limits), engines.get(name, {})
        if "failed" in known:
            continue
        try:
            token_bytes = known.get("token_bytes") or kind.token_bytes(arguments.environments, folder, variables)
            engine = stack.enter_context(PeerEngine(kind, arguments.environments, folder, variables))
            engine.run(workloads.warm_up(1000))
        except (EngineFailed, CalledProcessError) as error:
            engines[name] = known | {"failed": str(error)}
            print(f"{name}: {error}", file=sys.stderr)
            continue
        engine.pause()
        said = {"version": engine.version, "type": kind.type, "ready_s": engine.ready_s, "token_bytes": token_bytes}
        engines[name] = known | said
        print(f"{name}: {engine.version}, ready after {engine.ready_s:.1f} s", file=sys.stderr)
        yield name, engine


@dataclasses.dataclass(frozen=True)
class _Turns:
    """One workload of one round, which every engine answers once."""

    workload: workloads.Workload
    vocab_size: int
    number: int  # of the round
    reader: MemoryReader
    engines: dict[str, dict[str, Any]]  # what each said of itself

    def take(self, running: dict[str, PeerEngine], token_ids: _TokenIds) -> list[dict[str, Any]]:
        """A row an engine; their tokens are added to `token_ids`."""
        rows, answers = [], token_ids.setdefault((self.number, self.workload.name), {})
        for name in rotated(running, self.number):
            engine = running[name]
            row: dict[str, Any] = {"round": self.number, "workload": self.workload.name, "engine": name}
            try:
                measured, answers[name] = self._alone(engine, name) if self._is_alone else self._run(engine)
                row |= measured
            except EngineFailed as error:
                row["failed"] = str(error)
            rows.append(row)
            said = f"round {self.number + 1}, {self.workload.name}, {name}"
            print(f"{said}: {row.get('tokens_per_s', 'failed')}", file=sys.stderr)
        return rows

    @property
    def _is_alone(self) -> bool:
        return len(self.workload.requests) == 1

    def _run(self, engine: PeerEngine) -> tuple[dict[str, Any], list[list[int]]]:
        engine.resume()
        try:
            wall_s, token_ids = engine.run(self.workload)
        finally:
            engine.pause()
        return {"wall_s": wall_s, "tokens_per_s": self.workload.num_output_tokens / wall_s}, token_ids

    def _alone(self, engine: PeerEngine, name: str) -> tuple[dict[str, Any], list[list[int]]]:
        """The same between two looks at how fast memory is, and the seconds of another prompt alone."""
        token_bytes = self.engines[name]["token_bytes"]
        before = self.reader.gb_per_s(token_bytes)
        measured, token_ids = self._run(engine)
        other = workloads.make(self.workload.name, self.vocab_size, seed=workloads.SEED - 1 - self.number)
        prompt = dataclasses.replace(other, requests=(dataclasses.replace(other.requests[0], max_tokens=1),))
        measured["prompt_s"] = dataclasses.replace(self, workload=prompt)._run(engine)[0]["wall_s"]
        measured["read_gb_per_s"] = max(before, self.reader.gb_per_s(token_bytes))
        return measured, token_ids


def compare(rows: list[dict[str, Any]], token_ids: _TokenIds) -> None:
    """Adds to each row how many requests have the oracle's tokens, once all have answered: any may have been first."""
    for row in rows:
        answers = token_ids[row["round"], row["workload"]]
        oracle = next((name for name in ORACLES if name in answers), None)
        if oracle and row["engine"] in answers:
            pairs = zip(answers[row["engine"]], answers[oracle], strict=True)
            row["same_requests"] = sum(mine == theirs for mine, theirs in pairs)
            row |= {"num_requests": len(answers[oracle]), "oracle": oracle}


if __name__ == "__main__":
    raise SystemExit(main())
