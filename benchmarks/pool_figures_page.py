"""The tables of docs/scaling.md and docs/sharding.md, out of the newest results that are kept.

Nothing is measured here. `python -m docs.generate` writes what these functions return into the pages; a test compares.
"""

from __future__ import annotations

from typing import Any

from benchmarks import scaling
from benchmarks.figures_page import markdown_table, newest
from benchmarks.routing import OWN_BOUND_ONCE


def blocks() -> dict[str, str]:
    """Markdown by the name of the place where it stands."""
    return {
        "pool-sizes": _pool_sizes(newest("scaling")),
        "decisions": _decisions(newest("scaling")),
        "routing-rules": _routing_rules(newest("routing")),
        "worker-loss": _worker_loss(newest("scaling")["loss"]),
        "two-workers": _two_workers(newest("two-workers")),
        "shard-choice": _shard_choice(newest("shard-choice")),
        "sharded-steps": _sharded_steps(newest("sharded-steps")),
        "thousand-workers": _thousand_workers(newest("scaling")),
    }


def _pool_sizes(found: dict[str, Any]) -> str:
    first = found["backlog"][0]["tokens_per_s"]
    rows = [
        [
            str(backlog["workers"]),
            f"{backlog['tokens_per_s']:,.0f}",
            f"{backlog['tokens_per_s'] / first:.2f}",
            f"{arrivals['ttft_mean_ms']:.0f} / {arrivals['ttft_p99_ms']:.0f} ms",
        ]
        for backlog, arrivals in zip(found["backlog"], found["at_80_percent"], strict=True)
    ]
    headers = ["workers", "backlog, tokens/s", "times one worker's", "at 80 %: first token mean / p99"]
    return markdown_table(headers, rows)


def _decisions(found: dict[str, Any]) -> str:
    """What the step loop's thread does, in microseconds; results from before a column was measured have none there."""
    names = ("plain_step_us", "begin_us_per_request", "decision_us_per_step")
    rows = [
        [str(row["workers"]), *(f"{row[name]:,.0f} µs" if row.get(name) is not None else "-" for name in names)]
        for row in found["decisions"]
    ]
    headers = [
        "workers",
        "a step that begins no request",
        "each request, from arrival to first step",
        "a step on average",
    ]
    return markdown_table(headers, rows)


def _routing_rules(found: dict[str, Any]) -> str:
    """A table for each figure, a row a workload and a column a rule."""
    by_workload = found["medians"]
    rules = [rule for rule in next(iter(by_workload.values())) if rule != OWN_BOUND_ONCE]
    parts = []
    for title, cell in (
        ("Time to the first token, mean / p99, seconds", _waits),
        ("Share of prompt tokens found in a cache", lambda values: f"{values['cache_hit_rate']:.0%}"),
        ("Balance", lambda values: f"{values['balance']:.2f}"),
    ):
        rows = [[name, *(cell(of[rule]) if rule in of else "-" for rule in rules)] for name, of in by_workload.items()]
        parts += [f"{title}:", markdown_table(["workload", *rules], rows)]
    return "\n\n".join(parts)


def _waits(values: dict[str, float]) -> str:
    return f"{values['ttft_mean_ms'] / 1e3:.2f} / {values['ttft_p99_ms'] / 1e3:.2f}"


def _worker_loss(found: dict[str, Any]) -> str:
    second = int(scaling.LOSS.at_s)
    rows = []
    for name, key in (("one of eight is lost", "with"), ("no loss", "without")):
        figures = found[key]
        waits = f"{found['ttft_p99_ms_by_second'][key][second]:.0f} ms"
        rows.append([name, waits, f"{figures['longest_silence_ms']:.0f} ms", f"{figures['failed']}"])
    headers = [
        "",
        "first token p99 of requests that arrive in the second of the loss",
        "longest silence",
        "failed requests",
    ]
    return markdown_table(headers, rows)


def _two_workers(found: dict[str, Any]) -> str:
    rows = [[f"{pair['one']:,.0f}", f"{pair['two']:,.0f}", f"{pair['ratio']:.2f}"] for pair in found["pairs"]]
    return markdown_table(["one worker, tokens/s", "two workers, tokens/s", "times"], rows)


def _shard_choice(found: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['workers']:,}",
            f"{row['shards']}",
            f"{row['choice_us_p50']:,.0f} / {row['choice_us_p99']:,.0f} µs",
            f"{row['bits_mb']:.1f} MB",
            f"{row['report_mb_per_s']:.2f} MB/s",
            f"{row['blocks_too_many']:.3f}",
        ]
        for row in found["figures"]
    ]
    headers = ["workers", "shards", "choice, CPU time p50 / p99", "bits", "reports", "blocks overestimated a prompt"]
    return markdown_table(headers, rows)


def _sharded_steps(found: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['shards']}" + (" (`--frontends 2`)" if row["shards"] == 1 else ""),
            f"{row['workers']}",
            f"{row['steps_per_s']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['shard_cpu_s_per_1000_steps']:.2f} ms",
            f"{row['other_cpu_s_per_1000_steps']:.2f} ms",
        ]
        for row in found["figures"]
    ]
    headers = ["shards", "workers", "steps/s", "tokens/s", "CPU time a step: shards", "parent and frontends"]
    return markdown_table(headers, rows)


def _thousand_workers(found: dict[str, Any]) -> str:
    row = found["thousand_workers"]
    rows = [
        ["workers, shards, requests", f"{row['workers']:,}, {row['shards']}, {row['requests']:,}"],
        ["output tokens, in virtual time", f"{row['output_tokens']:,} in {row['virtual_s']:.1f} s"],
        ["tokens/s", f"{row['tokens_per_s']:,.0f}"],
        ["share of the time that workers compute", f"{row['busy']:.1%}"],
        ["first token, mean / p99", f"{row['ttft_mean_ms']:.0f} / {row['ttft_p99_ms']:.0f} ms"],
        ["longest silence of a stream", f"{row['longest_silence_ms']:.0f} ms"],
        ["choosing a shard, CPU time a request", f"{row['front_us_per_request']:.0f} µs"],
        ["step loop, CPU time a step", f"{row['engine_us_per_step']:.0f} µs"],
    ]
    return markdown_table(["", ""], rows)
