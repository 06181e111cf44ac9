"""`octavo replay`: fetches a server's flight record, shows the steps of one, or plays it and compares decisions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.commands.flags import connection
from octavo.shared.terminal_text import say

if TYPE_CHECKING:
    from octavo.bench.fleet.replay import Difference, Outcome
    from scheduler_svc.flight.record_file import Record

SUFFIX = ".jsonl.gz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A file, or where to fetch one; what to show of it."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a flight record: to read, or with --address to write")
    parser.add_argument(
        "--steps", type=_span, metavar="FROM:TO", help="show these steps, from 0 on, and play nothing; : shows all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    connection.add_optional_address(parser, "fetch the record of this server, and write it to FILE (role control)")


def run(arguments: argparse.Namespace) -> int:
    """0: all decisions are those of the record; 1: one is not, or the record cannot be used (one line says why)."""
    from octavo.cli import CommandError

    path = arguments.file
    if arguments.address is not None:
        _refuse_to_replace([path])
        return _fetch(arguments, path)
    from octavo.shared import log
    from scheduler_svc.flight import record_file
    from scheduler_svc.flight.errors import BadRecord

    log.configure("critical")  # what a replay does is nobody's news
    try:
        record = record_file.read(path)
        return _show(record, arguments) if arguments.steps is not None else _play(record, arguments)
    except BadRecord as error:
        raise CommandError(str(error)) from None


# ---- fetching -------------------------------------------------------------------------------------------------------


def _fetch(arguments: argparse.Namespace, path: Path) -> int:
    files: dict[int, bytes] = {}
    with connection.connect(arguments) as client:
        for shard, data in client.flight_records():
            files[shard] = files.get(shard, b"") + data
    names = {shard: path for shard in files}
    if len(files) > 1:
        names = {shard: path.with_name(f"{path.name.removesuffix(SUFFIX)}-{shard}{SUFFIX}") for shard in files}
    _refuse_to_replace(names.values())
    written = []
    with ExitStack() as unless_all:  # half of a record would keep the next attempt from its name
        for shard, data in files.items():
            name = names[shard]
            with name.open("xb") as file:
                unless_all.callback(name.unlink)
                file.write(data)
            written.append({"file": str(name), "shard": shard, "bytes": len(data)})
        unless_all.pop_all()
    if arguments.json:
        print(json.dumps(written))
    else:
        print("\n".join(f"{each['file']}: {each['bytes']:,} bytes" for each in written))
    return 0


def _refuse_to_replace(paths: Iterable[Path]) -> None:
    """Raises CommandError for the first that is there already."""
    from octavo.cli import CommandError

    for path in paths:
        if path.exists():
            raise CommandError(f"{path} is there already: another name is wanted for what is fetched")


# ---- showing --------------------------------------------------------------------------------------------------------


def _show(record: Record, arguments: argparse.Namespace) -> int:
    """A line a step, with what went before it."""
    first, last = arguments.steps
    number, since, shown = 0, list[str](), list[dict[str, Any]]()
    for entry in record.entries:
        if entry["entry"] != "step":
            if entry["entry"] not in ("turn", "begin", "look"):
                since.append(_told(entry))
            continue
        if first <= number < last:
            shown.append({"number": number, "worker": entry["worker"], "step": entry["step"], "since": since,
                          "decision": entry["decision"]})  # fmt: skip
        number, since = number + 1, []
    if arguments.json:
        print(json.dumps(shown))
        return 0
    say(_about(record))
    print(f"{'number':>7} {'worker':>6} {'step':>8} {'rows':>5} {'tokens':>6}  decision; what happened before")
    for step in shown:
        say(_row(step))
    return 0


def _about(record: Record) -> str:
    header, fault = record.header, record.header["fault"]
    workers = ", ".join(f"{each['worker']} is {each['address']}" for each in header["workers"])
    why = f"; for a fault: {fault['kind']} ({fault['where']})" if fault else ""
    return (
        f"Octavo {header['version']}, written {header['written']}{why}\n"
        f"{record.num_steps} steps, {len(record.requests)} requests, begins {header['begins']}; workers: {workers}"
    )


def _row(step: dict[str, Any]) -> str:
    from scheduler_svc.flight.decisions import num_rows_of, num_tokens_of

    decision = step["decision"]
    said = "; ".join(_lists(decision))
    since = f"  <- {', '.join(step['since'])}" if step["since"] else ""
    head = f"{step['number']:>7} {step['worker']:>6} {step['step']:>8} {num_rows_of(decision):>5}"
    return f"{head} {num_tokens_of(decision):>6}  {said}{since}"


def _lists(decision: dict[str, Any]) -> list[str]:
    """Few words a part, long lists by their lengths."""
    parts = []
    for name, value in decision.items():
        if name == "introduced":
            told = ", ".join(f"request {number} in {_slots(sequences)}" for number, sequences in value)
            parts.append(f"begins {told}")
        else:
            text = json.dumps(value, separators=(",", ":"))
            parts.append(f"{name} {text if len(text) <= 60 else f'{len(value)} of them'}")
    return parts


def _slots(sequences: list[list[Any]]) -> str:
    return "slots " + ",".join(str(sequence[0]) for sequence in sequences)


def _told(entry: dict[str, Any]) -> str:
    kind = entry["entry"]
    if kind == "answer":
        what = (
            f"step {entry['step']} {entry['status'].removeprefix('STEP_STATUS_')}"
            if "step" in entry
            else entry.get("says", "nonsense")
        )
        return f"worker {entry['worker']} says {what}"
    values = {
        name: value
        for name, value in entry.items()
        if name not in ("entry", "t") and not isinstance(value, dict | list)
    }
    return " ".join([kind, *(f"{name} {value}" for name, value in values.items())])


# ---- playing --------------------------------------------------------------------------------------------------------


def _play(record: Record, arguments: argparse.Namespace) -> int:
    from octavo.bench.fleet.replay import Replay

    outcome = Replay(record).run()
    if arguments.json:
        print(json.dumps(_as_dict(record, outcome)))
        return 0 if outcome.agrees else 1
    say(_about(record))
    for kind, where in dict.fromkeys(outcome.faults):
        say(f"the replay met a fault: {kind} ({where})")
    if outcome.difference is None:
        print(f"all {outcome.num_same} steps come out the same")
        return 0
    print(f"{outcome.num_same} of {outcome.num_steps} steps come out the same; number {outcome.num_same} does not:")
    say(side_by_side(outcome.difference))
    sys.stdout.flush()
    return 1


def _as_dict(record: Record, outcome: Outcome) -> dict[str, Any]:
    difference = outcome.difference
    return {
        "version": record.header["version"],
        "fault": record.header["fault"],
        "steps": outcome.num_steps,
        "same": outcome.num_same,
        "agrees": outcome.agrees,
        "faults": [{"kind": kind, "where": where} for kind, where in outcome.faults],
        "difference": difference
        and {"number": difference.place, "recorded": difference.recorded, "replayed": difference.replayed},
    }


def side_by_side(difference: Difference) -> str:
    """A line for each part of the two decisions, those that differ marked."""
    recorded, replayed = (_parts(step) for step in (difference.recorded, difference.replayed))
    lines = [f"  {'':<13} {'recorded':<46}  replayed"]
    for name in {**recorded, **replayed}:
        ours, theirs = recorded.get(name, "-"), replayed.get(name, "-")
        mark = " " if ours == theirs else "*"
        rows = max(-(-len(text) // 46) for text in (ours, theirs))
        for row in range(rows):
            span = slice(46 * row, 46 * row + 46)
            lines.append(f"{mark} {'' if row else name:<13} {ours[span]:<46}  {theirs[span]}")
    return "\n".join(lines)


def _parts(step: dict[str, Any] | None) -> dict[str, str]:
    if step is None:
        return {"step": "none"}
    decision = {name: json.dumps(value, separators=(",", ":")) for name, value in step["decision"].items()}
    return {"worker": str(step["worker"]), "step": str(step["step"]), **decision}


def _span(text: str) -> tuple[int, int]:
    """FROM:TO, half open, either of them left out. Raises ArgumentTypeError."""
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"{text!r} is no FROM:TO")
    return int(first or 0), int(last) if last else 1 << 60
