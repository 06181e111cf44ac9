"""Pictures of a measurement by matplotlib, which is installed with the extra `pictures`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PERCENTILES = (("p50", "#0b62a4", "-"), ("p90", "#6a4c93", "--"), ("p99", "#d1495b", ":"))
_WAITING, _ANSWERING, _FAILED = "#c9d8e6", "#0b62a4", "#d1495b"


def write(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Writes `latency.png`, and `timeline-N.png` for each run in turn. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"latency.png": latency([run["figures"] for run in result["runs"]])}
    for number, run in enumerate(result["runs"], 1):
        pictures[f"timeline-{number}.png"] = timeline(run)
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=110)
    return [folder / name for name in pictures]


def latency(rows: Sequence[dict[str, Any]]) -> Figure:
    """Latency and throughput against load; the x of a run is its planned rate, its streams, or what it reached."""
    from matplotlib.figure import Figure

    name, label = next(
        (name, label)
        for name, label in (
            ("rate", "planned requests/s"),
            ("streams", "streams at once"),
            ("requests_per_s", "requests/s"),
        )
        if all(row[name] is not None for row in rows)
    )
    rows = sorted(rows, key=lambda row: row[name])
    xs = [row[name] for row in rows]
    figure = Figure(figsize=(12, 4), layout="constrained")
    first, between, done = figure.subplots(1, 3)
    for axes, field, title in (
        (first, "ttft_ms", "time to first token"),
        (between, "tpot_ms", "time per output token"),
    ):
        for percent, color, style in _PERCENTILES:
            axes.plot(xs, [row[field][percent] for row in rows], style, color=color, marker="o", label=percent)
        axes.set(title=title, xlabel=label, ylabel="ms", ylim=(0, None))
        axes.legend()
    done.plot(xs, [row["requests_per_s"] for row in rows], color="#0b62a4", marker="o", label="ended well")
    if all(row["goodput_per_s"] is not None for row in rows):
        done.plot(xs, [row["goodput_per_s"] for row in rows], "--", color="#2e8b57", marker="s", label="within the SLO")
    if name == "rate":
        done.plot(xs, xs, color="#999999", linewidth=1, label="planned")
    done.set(title="throughput and goodput", xlabel=label, ylabel="requests/s", ylim=(0, None))
    done.legend()
    return figure


def timeline(run: dict[str, Any]) -> Figure:
    """A line a request, by when it was sent: pale until its first token, then dark; a cross where it failed."""
    from matplotlib.figure import Figure

    requests = sorted(run["requests"], key=lambda each: each["sent_s"])
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for row, each in enumerate(requests):
        first_s = each["end_s"] if each["first_s"] is None else each["first_s"]
        axes.hlines(row, each["sent_s"], first_s, color=_WAITING, linewidth=2)
        axes.hlines(row, first_s, each["end_s"], color=_ANSWERING, linewidth=2)
    failed = [(each["end_s"], row) for row, each in enumerate(requests) if each["error"] is not None]
    axes.plot([], [], color=_WAITING, linewidth=3, label="to the first token")
    axes.plot([], [], color=_ANSWERING, linewidth=3, label="to the end")
    if failed:
        axes.plot(*zip(*failed, strict=True), "x", color=_FAILED, label="failed")
    if run["warm_up"]:
        axes.axhspan(-0.5, run["warm_up"] - 0.5, color="#eeeeee", zorder=0, label="warm-up")
    axes.set(title=run["figures"]["load"], xlabel="seconds", ylabel="request")
    axes.invert_yaxis()
    axes.legend(loc="upper right")
    return figure
