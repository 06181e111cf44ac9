"""What the results of `benchmarks.peers` say: speeds by engine, each of ours beside the best other, and its bound."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.peer_kinds import ENGINES


def report(rows: dict[str, Any]) -> str:
    """Tokens/s as medians, and of each of ours the ratio to the best of the others: median and range over rounds.

    Behind the tokens/s of W1: of the speed at which memory was read meanwhile, what its tokens behind the first used.
    """
    names = sorted({run["workload"] for run in rows["runs"]})
    oracle = next((run["oracle"] for run in rows["runs"] if "oracle" in run), "nobody")
    has_bound = any("read_gb_per_s" in run for run in rows["runs"])
    headers = [f"{name}, tokens/s" for name in names] + ["of memory's bound"] * has_bound
    lines = [f"| engine | {' | '.join(headers)} | tokens of {oracle} | ready | memory |"]
    lines.append("| --- " * (len(headers) + 4) + "|")
    for engine, facts in rows["engines"].items():
        if "ready_s" not in facts:
            continue
        medians = [_median(rows, engine, name) for name in names]
        if has_bound:
            medians.append(_of_bound(rows, engine))
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


def shares_of_bound(rows: dict[str, Any], engine: str) -> list[float]:
    """By rounds of a request that was alone: bytes a second of its tokens behind the first, as each reads all weights,
    over those that were read a second before or after it, whichever were more."""
    token_bytes = rows["engines"][engine].get("token_bytes")
    shares = []
    for run in rows["runs"]:
        if run["engine"] == engine and "read_gb_per_s" in run and token_bytes:
            tokens = round(run["tokens_per_s"] * run["wall_s"]) - 1
            gb_per_s = tokens * token_bytes / (run["wall_s"] - run["prompt_s"]) / 1e9
            shares.append(gb_per_s / run["read_gb_per_s"])
    return shares


def _of_bound(rows: dict[str, Any], engine: str) -> str:
    shares = shares_of_bound(rows, engine)
    return f"{statistics.median(shares):.2f}" if shares else ""


def _median(rows: dict[str, Any], engine: str, workload: str) -> str:
    if numbers := speeds(rows, engine, workload).values():
        return f"{statistics.median(numbers):.0f}"
    ran = any(run["engine"] == engine and run["workload"] == workload for run in rows["runs"])
    return "failed" if ran else "-"
