"""The tables of docs/gpu.md, of what `benchmarks.gpu` found on a card; see `benchmarks.figures_page`."""

from __future__ import annotations

from typing import Any

from benchmarks.figures_page import markdown_table, newest

_CARD = "nvidia-h200"
_MET = {True: "yes", False: "**no**", None: "-"}


def blocks() -> dict[str, str]:
    """Markdown by the name of the place where it stands."""
    kernels, steps = newest("gpu", _CARD), newest("gpu-steps", _CARD)
    rows = [figure for figure in kernels["figures"] if figure["section"] == "kernels"]
    return {
        "gpu-machine": _machine(kernels),
        "gpu-tests": _tests(kernels),
        "gpu-kernels": _kernels([row for row in rows if row["goal"]]),
        "gpu-formats": _kernels([row for row in rows if "quantized" in row["name"] and not row["goal"]]),
        "gpu-steps": _steps(steps["figures"]),
    }


def _figure(value: float) -> str:
    """Four digits, and all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _machine(results: dict[str, Any]) -> str:
    machine, card = results["machine"], results["machine"]["gpu"]
    packages = machine["packages"]
    return (
        f"One {card['name']} ({card['memory_gib']:.0f} GiB, {card['multiprocessors']} multiprocessors), "
        f"{machine['cores']} cores, CUDA {card['cuda']}, torch {packages['torch']}, Triton {packages['triton']}, "
        f"transformers {packages['transformers']}, Python {machine['python']}; {results['date'][:10]}."
    )


def _tests(results: dict[str, Any]) -> str:
    counts = next(figure["detail"] for figure in results["figures"] if figure["name"] == "tests passed")
    text = f"{counts['passed']} tests passed, {counts['failed']} failed, {counts['skipped']} were skipped"
    if not counts["is_complete"]:
        text += f"; the run ended at its time limit, with {len(counts['unfinished'])} tests begun and the rest not run"
    return text + "."


def _kernels(figures: list[dict[str, Any]]) -> str:
    headers = ["operation", "shape", "us", "rate", "of the card", "best of PyTorch", "times as fast", "goal", "met"]
    return markdown_table(headers, [_cells(figure) for figure in figures])


def _cells(figure: dict[str, Any]) -> list[str]:
    row = figure["detail"]
    is_of_bytes = row["is_bound_by_memory"]
    return [
        row["op"],
        row["shape"],
        f"{row['us']:,.1f}",
        f"{row['gb_per_s']:,.0f} GB/s" if is_of_bytes else f"{row['tflops']:,.0f} TFLOP/s",
        f"{100 * row['of_ceiling']:.0f} %",
        row["best_peer"] or "-",
        f"{row['of_best_peer']:.2f}" if row["of_best_peer"] else "-",
        figure["goal"] or "-",
        _MET[figure["is_goal_met"]],
    ]


def _steps(figures: list[dict[str, Any]]) -> str:
    return markdown_table(
        ["what", "value", "goal", "met"],
        [
            [
                one["name"],
                f"{_figure(one['value'])} {one['unit']}".strip(),
                one["goal"] or "-",
                _MET[one["is_goal_met"]],
            ]
            for one in figures
        ],
    )
