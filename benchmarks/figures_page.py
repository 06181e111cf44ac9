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

from benchmarks import gateway, peers, product_speed, step_profile, thread_settings, tracing
from benchmarks.readme_figures import report as workloads_report
from octavo.bench import picture
from octavo.bench.figures import Figures
from octavo.bench.picture import Chart, Series

RESULTS = Path(__file__).parent / "results"
ZEN5, ZEN4 = "amd-epyc-2-cores", "amd-epyc-family-25-model-17-2-cores"  # the two machines that peers ran on
WORKLOADS = ("W1", "W2", "W3")
FLOAT32_PEERS = ("vllm-eager", "vllm-compiled", "openvino")
_MODES = ("default", "batch-invariant", "32 bits")  # of benchmarks.cpu_workloads


def newest(kind: str, slug: str = "*") -> dict[str, Any]:
    """The newest results of a kind; `kind` is empty for those of the workloads themselves."""
    pattern = "-".join(part for part in ("????-??-??", kind, slug) if part)
    found: dict[str, Any] = json.loads(max(RESULTS.glob(f"{pattern}.json")).read_text(encoding="utf-8"))
    return found


def blocks() -> dict[str, str]:
    """Markdown by the name of the place where it stands."""
    return {
        "workloads": _workloads(),
        "peers-zen5": _peers(ZEN5),
        "peers-zen4": _peers(ZEN4),
        "weights-zen5": _weights(ZEN5),
        "weights-zen4": _weights(ZEN4),
        "recovery": _recovery(),
        "slow-network": _slow_network(),
        "step-costs": _step_costs(),
        "flight-recorder": _flight_recorder(),
        "way-out": _way_out(),
        "gateway-cost": _gateway_cost(),
        "loading": _loading(),
        "sampler": _sampler(),
        "quantization-quality": _quantization_quality(),
        "fp8-cache-quality": _fp8_cache_quality(),
        "w1-ratios": _w1_ratios(),
        "w1-runs": _w1_runs(),
        "step-profile": _step_profile(),
        "product-speed": product_speed.report(newest("product-speed")),
        "busy-neighbour": _busy_neighbour(),
        "tracing-cost": _tracing_cost(),
    }


def draw(path: Path) -> None:
    """The README's plot: tokens/s of each workload by engine, float32 on the left, 8 bits on the right."""
    results = newest("peers", ZEN5)
    whole = _medians_of_modes(ZEN5)
    places = list(range(len(WORKLOADS)))
    float32 = [
        Series("Octavo", places, _speeds(results, "octavo")),
        Series("Octavo, 32-bit weights", places, [whole[name]["32 bits"] for name in WORKLOADS]),
        Series("OpenVINO GenAI", places, _speeds(results, "openvino")),
        Series("vLLM", places, _speeds(results, "vllm-compiled")),
    ]
    eight_bits = [
        Series("Octavo", places, _speeds(results, "octavo-int8")),
        Series("OpenVINO GenAI", places, _speeds(results, "openvino-int8"), color=2),  # as on the left
        Series("llama.cpp", places, _speeds(results, "llamacpp-q8_0"), color=4),
    ]
    charts = [
        Chart(title, "workload", "tokens/s", series, categories=WORKLOADS, is_bars=True)
        for title, series in (("float32, higher is better", float32), ("8 bits, higher is better", eight_bits))
    ]
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


def _peers(slug: str) -> str:
    table, _, ratios = peers.report(newest("peers", slug)).partition("\n\n")
    return "\n".join([table, "", *(f"- {line}" for line in ratios.splitlines())])


def _medians_of_modes(slug: str) -> dict[str, dict[str, float]]:
    rounds = newest("cpu-workloads", slug)["rounds"]
    return {name: {mode: statistics.median(one[mode][name] for one in rounds) for mode in _MODES} for name in WORKLOADS}


def _best_float32(slug: str, place: int) -> tuple[float, str]:
    results = newest("peers", slug)
    there = [name for name in FLOAT32_PEERS if "ready_s" in results["engines"].get(name, {})]
    return max((_speeds(results, name)[place], name) for name in there)


def _weights(slug: str) -> str:
    rows = []
    for place, (name, of) in enumerate(_medians_of_modes(slug).items()):
        speed, best = _best_float32(slug, place)
        rows.append([name, *(f"{of[mode]:.0f}" for mode in _MODES), f"{speed:.0f} ({best})"])
        rows[-1].append(f"{of['32 bits'] / speed:.2f}")
    headers = ["workload", "weights quantised once", "the same, `--batch-invariant`", "weights of 32 bits"]
    return markdown_table([*headers, "best other engine", "weights of 32 bits over it"], rows)


def _w1_ratios() -> str:
    """For the README: W1 is where it matters most what the weights once were."""
    rows = []
    for name, slug in (("Zen 5", ZEN5), ("Zen 4", ZEN4)):
        results, (speed, best) = newest("peers", slug), _best_float32(slug, 0)
        ours, theirs = (peers.speeds(results, engine, "W1") for engine in ("octavo", best))
        once = statistics.median(ours[number] / theirs[number] for number in ours)  # as the table of peers has it
        rows.append([name, f"{once:.1f}", f"{_medians_of_modes(slug)['W1']['32 bits'] / speed:.2f}"])
    return markdown_table(["W1, times the best other engine", "weights quantised once", "weights of 32 bits"], rows)


def _w1_runs() -> str:
    """The same figure from each of the runs whose tables show it, so that readers do not mix them up."""
    whole, alone, beside = newest("", ZEN5), newest("cpu-workloads", ZEN5), newest("peers", ZEN5)
    of_rounds = {
        "readme_figures": [
            row["output_tokens_per_s"] for row in whole["rounds"] if (row["workload"], row["over"]) == ("W1", "LLM")
        ],
        "cpu_workloads": [one["default"]["W1"] for one in alone["rounds"]],
        "peers": list(peers.speeds(beside, "octavo", "W1").values()),
    }
    rows = []
    for (name, speeds), found in zip(of_rounds.items(), (whole, alone, beside), strict=True):
        cells = [f"{statistics.median(speeds):.0f}", ", ".join(f"{speed:.0f}" for speed in speeds)]
        rows.append([f"`benchmarks.{name}`", found["date"][:16].replace("T", " "), *cells])
    return markdown_table(["run", "date", "W1, tokens/s", "its rounds"], rows)


# ---- Octavo alone ---------------------------------------------------------------------------------------------------


def _workloads() -> str:
    found = newest("", ZEN5)
    names = [field.name for field in fields(Figures)]
    rows = [
        Figures(**{name: _number(row[name]) for name in names if name in row and name != "streams"})
        for row in found["rounds"]
    ]
    starts, steps, agreement = found["starts"], found["steps"], found["same_tokens_as_transformers"]
    return workloads_report(found["machine"], starts, rows, steps, agreement)


def _number(value: Any) -> Any:
    """JSON has no NaN: what was not measured is null there."""
    return math.nan if value is None else value


def _recovery() -> str:
    rows = [
        [row["fault"], str(row["runs"]), f"{row['p50_s']:.2f} s", f"{row['max_s']:.1f} s"]
        for row in newest("chaos")["from a fault to the next token"]
        if row["moment"] == "any"
    ]
    return markdown_table(["fault", "runs", "p50", "longest"], rows)


def _slow_network() -> str:
    by_delay: dict[int, list[str]] = {}
    for row in newest("chaos")["throughput over a slow network"]:
        by_delay.setdefault(row["delay_ms_each_way"], []).append(f"{row['tokens_per_s']:,.0f}")
    rows = [[f"{delay} ms", *speeds] for delay, speeds in by_delay.items()]
    return markdown_table(["delay each way", "1 step in flight, tokens/s", "2 steps in flight, tokens/s"], rows)


def _step_costs() -> str:
    columns = ("schedule", "encode", "decode", "process", "total")
    places = ("sequences", "workers", "waiting", "cached_blocks")
    rows = [
        [*(f"{row[place]:,}" for place in places), *(f"{row['us_per_step'][name]:,.0f} µs" for name in columns)]
        for row in newest("steps", "amd-epyc-2-cores")["rows"]
    ]
    return markdown_table([name.replace("_", " ") for name in (*places, *columns)], rows)


def _flight_recorder() -> str:
    results = newest("flight-recorder")
    median, sequences = results["median_us_per_step"], f"{results['sequences']:,} sequences"
    rows = [
        [f"a step of {sequences}, recorder off", f"{median['off']:,.0f} µs"],
        ["the same, recorder on", f"{median['on']:,.0f} µs"],
        ["what a step tells the recorder, alone", f"{results['recorder_alone_us_per_step']:.1f} µs"],
        [f"an image of the state, {sequences}", f"{results['image_us'] / 1e3:.1f} ms"],
    ]
    about = f"{results['machine']['cpu']}, {results['machine']['cores']} cores, {results['date']}:"
    return f"{about}\n\n{markdown_table(['', 'CPU time'], rows)}"


def _way_out() -> str:
    rows = []
    for part, of in newest("way-out")["parts"].items():
        for row in of["rows"]:
            cells = [part, f"{row['streams']:,}", f"{row['messages_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}"]
            cells += [f"{row['cpu_s_per_1000_tokens']:.3f}", f"{row['cpu_share']:.0%}"]
            p50, p99 = row["between_messages_p50_ms"], row["between_messages_p99_ms"]
            rows.append([*cells, f"{p50:.1f} / {p99:.0f} ms"])
    headers = ["", "streams", "messages/s", "tokens/s", "CPU s / 1,000 tokens", "of the core"]
    return markdown_table([*headers, "between messages p50 / p99"], rows)


def _gateway_cost() -> str:
    """The medians, and of what."""
    results = newest("gateway")
    about = f"{results['machine']['cpu']}, 2 cores, {results['date'][:10]}:"
    return f"{about}\n\n{gateway.table(results['median'])}"


def _tracing_cost() -> str:
    results = newest("tracing")
    about = f"{results['machine']['cpu']}, {results['streams']} streams, {results['starts']} starts of each scheduler"
    return f"{about}, {results['date'][:10]}:\n\n{tracing.table(results)}"


def _loading() -> str:
    rows = [
        [row["what"], row["page_cache"], f"{row['seconds']:.2f} s", f"{row['peak_mb']:,} MB"]
        for row in newest("loading")["rows"]
    ]
    return markdown_table(["", "file cache", "time", "peak memory"], rows)


def _sampler() -> str:
    rows = [[row["kind"], f"{row['adjust_ms'] + row['sample_ms']:.0f} ms"] for row in newest("sampler")["kinds"]]
    return markdown_table(["sampling", "256 rows of 128,256 tokens"], rows)


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
    return markdown_table([*headers, "greedy tokens of W2 that stay"], rows)


def _fp8_cache_quality() -> str:
    rows = []
    for row in newest("fp8-cache-quality")["rows"]:
        perplexity = f"{row['perplexity']:.2f}" if "tiny" not in row["model"] else "-"
        same, divergence = f"{row['same_most_likely_token']:.1%}", f"{row['divergence']:.2g}"
        rows.append([row["model"], f"{row['largest']:.0f}", row["cache"], perplexity, same, divergence])
    headers = ["model", "largest number", "cache", "perplexity", "most likely tokens that stay", "divergence, nats"]
    return markdown_table(headers, rows)


def _step_profile() -> str:
    return "\n\n".join(step_profile.report(result) for result in newest("step-profile").values())


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
