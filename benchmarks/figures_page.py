"""The tables of measurements.md and cpu-performance.md and the README's plot, out of the newest results that are kept.

Nothing is measured here. `python -m docs.generate` writes what these functions return into the pages; a test compares.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import gateway, peer_figures, product_speed, step_parts, step_profile, thread_settings, tracing
from benchmarks.instruction_sets import SETS
from benchmarks.readme_figures import report as workloads_report
from octavo.bench import picture
from octavo.bench.figures import Figures
from octavo.bench.picture import Chart, Series

RESULTS = Path(__file__).parent / "results"
ZEN5, ZEN4 = "amd-epyc-family-26-model-2-2-cores", "amd-epyc-family-25-model-17-2-cores"
ZEN3 = "amd-epyc-family-25-model-1-2-cores"
WORKLOADS = ("W1", "W2", "W3")
# Models of benchmarks.peers, and what they are called in tables.
MODELS = {
    "smollm2-135m-instruct": "SmolLM2-135M",
    "qwen3-0.6b": "Qwen3-0.6B's size",
    "llama-3.2-1b": "Llama-3.2-1B's size",
}
NOT_MEASURED = "Not measured yet."
ENGINE_NAMES = {"octavo": "Octavo", "openvino": "OpenVINO GenAI", "vllm": "vLLM", "llamacpp": "llama.cpp"}


def newest(kind: str, slug: str = "*") -> dict[str, Any]:
    """The newest results of a kind; `kind` is empty for those of the workloads themselves."""
    found: dict[str, Any] = json.loads(_newest_path(kind, slug).read_text(encoding="utf-8"))
    return found


def _newest_path(kind: str, slug: str) -> Path:
    pattern = "-".join(part for part in ("????-??-??", kind, slug) if part)
    return max(RESULTS.glob(f"{pattern}.json"))


def dated(table: str, kind: str, slug: str = "*", about: str = "") -> str:
    """A table of the newest results of a kind, below a line that says on what machine they were measured, and when."""
    facts, day = newest(kind, slug)["machine"], _newest_path(kind, slug).name[: len("2026-01-01")]
    return f"{facts['cpu']}, {facts['cores']} cores, {day}{about}:\n\n{table}"


def blocks() -> dict[str, str]:
    """Markdown by the name of the place where it stands."""
    return {
        "workloads": _workloads(),
        "peers": "\n\n".join(_peers(model) for model in MODELS),
        "peers-ratios": _peers_ratios(),
        "peers-limited": _peers_limited(),
        "peers-elsewhere": _peers_elsewhere(),
        "recovery": _recovery(),
        "slow-network": _slow_network(),
        "step-costs": _step_costs(),
        "flight-recorder": _flight_recorder(),
        "way-out": _way_out(),
        "gateway-cost": _gateway_cost(),
        "loading": _loading(),
        "ready": "\n\n".join(_ready(machine) for machine in (ZEN5, ZEN4, ZEN3)),
        "sampler": _sampler(),
        "quantization-quality": _quantization_quality(),
        "fp8-cache-quality": _fp8_cache_quality(),
        "step-profile": _step_profile(),
        "step-parts": _step_parts(),
        "product-speed": product_speed.report(newest("product-speed")),
        "busy-neighbour": _busy_neighbour(),
        "tracing-cost": _tracing_cost(),
    }


def draw(path: Path) -> None:
    """The README's plot: tokens/s of each workload by engine, bfloat16 on the left, 8 bits on the right."""
    results, places = newest("peers-smollm2-135m-instruct", ZEN5), list(range(len(WORKLOADS)))
    charts = []
    for title, engines in (
        ("bfloat16, higher is better", {"octavo-bfloat16": 0, "openvino-bfloat16": 1, "vllm-bfloat16": 2}),
        ("8 bits, higher is better", {"octavo-int8": 0, "openvino-int8": 1, "llamacpp-q8_0": 3}),
    ):
        series = [
            Series(ENGINE_NAMES[name.partition("-")[0]], places, _speeds(results, name), color=color)
            for name, color in engines.items()
            if "ready_s" in results["engines"].get(name, {})
        ]
        charts.append(Chart(title, "workload", "tokens/s", series, categories=WORKLOADS, is_bars=True))
    picture.write(path, charts)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# ---- Octavo beside other engines ------------------------------------------------------------------------------------


def _speeds(results: dict[str, Any], engine: str) -> list[float]:
    """Medians over rounds, one a workload."""
    runs = [run for run in results["runs"] if run["engine"] == engine]
    return [statistics.median(run["tokens_per_s"] for run in runs if run["workload"] == name) for name in WORKLOADS]


def _peers(model: str) -> str:
    return _peers_table(MODELS[model], newest(f"peers-{model}", ZEN5))


def _peers_limited() -> str:
    """Of each set of instructions that was measured."""
    tables = [
        _peers_table(f"{MODELS[model]}, limited to {name}", newest(f"peers-{name}-{model}"))
        for name in SETS
        for model in MODELS
        if any(RESULTS.glob(f"????-??-??-peers-{name}-{model}-*.json"))
    ]
    return "\n\n".join(tables) or NOT_MEASURED


def _peers_elsewhere() -> str:
    """Of machines other than the one that `_peers` shows, the newest of each."""
    tables = []
    for model in MODELS:
        paths = sorted(RESULTS.glob(f"????-??-??-peers-{model}-*.json"))
        newest_of_each = {path.name[len("2026-01-01") :]: path for path in paths}.values()
        others = [path for path in newest_of_each if path != _newest_path(f"peers-{model}", ZEN5)]
        tables += [_peers_table(MODELS[model], json.loads(path.read_text(encoding="utf-8"))) for path in others]
    return "\n\n".join(tables) or NOT_MEASURED


def _peers_table(about: str, results: dict[str, Any]) -> str:
    table, _, ratios = peer_figures.report(results).partition("\n\n")
    machine = results["machine"]
    days = sorted({run.get("day", results["date"][:10]) for run in results["runs"]})
    about += f", {' and '.join(days)}, {machine['cores']} cores of {machine['cpu']}"
    about += f" ({machine['instructions']}):"
    return "\n".join([about, "", table, "", *(f"- {line}" for line in ratios.splitlines())])


def _peers_ratios() -> str:
    """For the README: Octavo's speed over that of the best other engine, one request and then 32."""
    ours = {"octavo": "float32", "octavo-bfloat16": "bfloat16", "octavo-int8": "int8", "octavo-int4": "int4"}
    rows = []
    for model, name in MODELS.items():
        results = newest(f"peers-{model}", ZEN5)
        rounded = "octavo-gguf4-int8"  # rows of 8 bits, as others have them
        of_file = rounded if "ready_s" in results["engines"].get(rounded, {}) else "octavo-gguf4"
        ratios = [[_ratio(results, engine, each) or math.nan for each in ("W1", "W2")] for engine in [*ours, of_file]]
        rows.append([name, *(f"{one:.1f}, {many:.1f}" for one, many in ratios)])
    return markdown_table(["W1, W2", *ours.values(), "4-bit GGUF"], rows)


def _ratio(results: dict[str, Any], engine: str, workload: str) -> float | None:
    best = peer_figures.best_other(results, engine, workload)
    return None if best is None else statistics.median(best[1])


# ---- Octavo alone ---------------------------------------------------------------------------------------------------


def _workloads() -> str:
    found = newest("", ZEN5)
    names = [field.name for field in fields(Figures)]
    rows = [
        Figures(**{name: _number(row[name]) for name in names if name in row and name != "streams"})
        for row in found["rounds"]
    ]
    starts, steps, agreement = found["starts"], found["steps"], found["same_tokens_as_transformers"]
    report = workloads_report(found["machine"], starts, rows, steps, agreement)
    return f"{found['date'][:10]}, {report}"


def _number(value: Any) -> Any:
    """JSON has no NaN: what was not measured is null there."""
    return math.nan if value is None else value


def _recovery() -> str:
    rows = [
        [row["fault"], str(row["runs"]), f"{row['p50_s']:.2f} s", f"{row['max_s']:.1f} s"]
        for row in newest("chaos")["from a fault to the next token"]
        if row["moment"] == "any"
    ]
    return dated(markdown_table(["fault", "runs", "p50", "longest"], rows), "chaos")


def _slow_network() -> str:
    by_delay: dict[int, list[str]] = {}
    for row in newest("chaos")["throughput over a slow network"]:
        by_delay.setdefault(row["delay_ms_each_way"], []).append(f"{row['tokens_per_s']:,.0f}")
    rows = [[f"{delay} ms", *speeds] for delay, speeds in by_delay.items()]
    return dated(
        markdown_table(["delay each way", "1 step in flight, tokens/s", "2 steps in flight, tokens/s"], rows), "chaos"
    )


def _step_costs() -> str:
    columns = ("schedule", "encode", "decode", "process", "total")
    places = ("sequences", "workers", "waiting", "cached_blocks")
    rows = [
        [*(f"{row[place]:,}" for place in places), *(f"{row['us_per_step'][name]:,.0f} µs" for name in columns)]
        for row in newest("steps")["rows"]
    ]
    return dated(markdown_table([name.replace("_", " ") for name in (*places, *columns)], rows), "steps")


def _flight_recorder() -> str:
    results = newest("flight-recorder")
    median, sequences = results["median_us_per_step"], f"{results['sequences']:,} sequences"
    rows = [
        [f"a step of {sequences}, recorder off", f"{median['off']:,.0f} µs"],
        ["the same, recorder on", f"{median['on']:,.0f} µs"],
        ["what a step tells the recorder, alone", f"{results['recorder_alone_us_per_step']:.1f} µs"],
        [f"an image of the state, {sequences}", f"{results['image_us'] / 1e3:.1f} ms"],
    ]
    return dated(markdown_table(["", "CPU time"], rows), "flight-recorder")


def _way_out() -> str:
    rows = []
    for part, of in newest("way-out")["parts"].items():
        for row in of["rows"]:
            cells = [part, f"{row['streams']:,}", f"{row['messages_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}"]
            cells += [f"{row['cpu_s_per_1000_tokens']:.3f}", f"{row['cpu_share']:.0%}"]
            p50, p99 = row["between_messages_p50_ms"], row["between_messages_p99_ms"]
            rows.append([*cells, f"{p50:.1f} / {p99:.0f} ms"])
    headers = ["", "streams", "messages/s", "tokens/s", "CPU s / 1,000 tokens", "of the core"]
    return dated(markdown_table([*headers, "between messages p50 / p99"], rows), "way-out")


def _gateway_cost() -> str:
    """The medians, and of what."""
    results = newest("gateway")
    return dated(gateway.table(results["median"]), "gateway")


def _tracing_cost() -> str:
    results = newest("tracing")
    about = f"{results['machine']['cpu']}, {results['streams']} streams, {results['starts']} starts of each scheduler"
    return f"{about}, {results['date'][:10]}:\n\n{tracing.table(results)}"


def _loading() -> str:
    rows = [
        [row["what"], row["page_cache"], f"{row['seconds']:.2f} s", f"{row['peak_mb']:,} MB"]
        for row in newest("loading")["rows"]
    ]
    return dated(markdown_table(["", "file cache", "time", "peak memory"], rows), "loading")


def _ready(machine: str) -> str:
    """Of a model of 1.2 billion weights, medians by types: quantised ones at a first start and at a later one. The last
    are those of its GGUF file."""
    plain, of_file = (newest(kind, machine)["rows"] for kind in ("ready-llama-3.2-1b", "ready-llama-3.2-1b-4-bit"))
    in_four_bits = {"float32": "Q4_K_M", "int8": "Q4_K_M, rounded rows"}
    rows = []
    for name, rounds in (
        *((row["kind"], row["rounds"]) for row in plain),
        *((in_four_bits[row["kind"]], row["rounds"]) for row in of_file if row["kind"] in in_four_bits),
    ):
        ready_s, first_s, peak_mb = (
            statistics.median(each[of] for each in rounds) for of in ("ready_s", "first_token_s", "peak_mb")
        )
        rows.append([name, f"{ready_s:.1f} s", f"{first_s:.1f} s", f"{peak_mb:,.0f} MB"])
    table = markdown_table(["weights", "ready", "first token", "memory of the worker"], rows)
    return dated(table, "ready-llama-3.2-1b", machine, ", files in memory")


def _sampler() -> str:
    rows = [[row["kind"], f"{row['adjust_ms'] + row['sample_ms']:.0f} ms"] for row in newest("sampler")["kinds"]]
    return dated(markdown_table(["sampling", "256 rows of 128,256 tokens"], rows), "sampler")


def _quantization_quality() -> str:
    rows = []
    for row in newest("quantization-quality")["rows"]:
        text, greedy = row["texts"]["alice.txt"], row["greedy_w2"]["same_token_given_the_same_before"]
        before, after = text["perplexity"], text["perplexity_quantised"]
        stay = [f"{text['same_most_likely_token']:.1%}", f"{greedy:.1%}"]
        quantization = f"`--quantization {row['quantization']}`"
        rows.append(
            [row["weights"], quantization, f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}", *stay]
        )
    headers = ["weights", "", "perplexity, float32", "quantised", "change", "most likely tokens that stay"]
    return dated(markdown_table([*headers, "greedy tokens of W2 that stay"], rows), "quantization-quality")


def _fp8_cache_quality() -> str:
    rows = []
    for row in newest("fp8-cache-quality")["rows"]:
        perplexity = f"{row['perplexity']:.2f}" if "tiny" not in row["model"] else "-"
        same, divergence = f"{row['same_most_likely_token']:.1%}", f"{row['divergence']:.2g}"
        rows.append([row["model"], f"{row['largest']:.0f}", row["cache"], perplexity, same, divergence])
    headers = ["model", "largest number", "cache", "perplexity", "most likely tokens that stay", "divergence, nats"]
    return dated(markdown_table(headers, rows), "fp8-cache-quality")


def _step_profile() -> str:
    results = newest("step-profile")
    return "\n\n".join(step_profile.report(results[f"smollm2-135m-instruct {type_}"]) for type_ in ("float32", "int8"))


def _step_parts() -> str:
    results = [result for result in newest("step-profile").values() if step_parts.is_in(result)]
    if not results:
        return NOT_MEASURED
    facts = results[0]["machine"]
    about = f"{facts['cpu']}, {facts['cores']} cores, {results[0]['date']}, milliseconds:"
    return f"{about}\n\n{step_parts.table(results)}"


def _busy_neighbour() -> str:
    """Two threads with the way of waiting that workers have, by workload; medians over rounds."""
    found = newest("threads", ZEN4)
    speeds, cores_taken = found["output_tokens_per_s"], found["cores_taken_by_neighbours"]
    num_cores = found["machine"]["cores"]
    rows = []
    for name in ("W1", "W2"):
        key = f"{name} | {num_cores} | {thread_settings.CHOSEN}"
        alone, beside = speeds[f"{key} | 0"], speeds[f"{key} | 1"]
        part = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
        not_taken = 1 - statistics.median(cores_taken[f"{key} | 1"]) / num_cores
        cells = [f"{statistics.median(alone):.1f}", f"{statistics.median(beside):.1f}", f"{part:.2f}"]
        rows.append([name, *cells, f"{not_taken:.2f}", f"{thread_settings.fair_share(num_cores, num_cores, 1):.2f}"])
    headers = ["workload", "alone, tokens/s", "beside it, tokens/s", "speed kept", "cores left by it", "a fair share"]
    return markdown_table(headers, rows)
