"""The table of measurements.md on the host of a GPU worker; see `benchmarks.figures_page`."""

from __future__ import annotations

from typing import Any

from benchmarks.figures_page import dated, markdown_table, newest

_WORDS = {"decode": "64 tokens of 64 sequences", "sampled": "64 tokens, with top-p, penalties and logprobs"}
_WORDS |= {"drawn": "64 tokens, with temperature and top-p"}
_WORDS |= {"mixed": "32 of 32 sequences, a prompt of 32", "prompt": "a prompt of 64"}


def blocks() -> dict[str, str]:
    """Markdown by the name of the place where it stands."""
    now, before = _rows(newest("gpu-host-time")), _rows(newest("gpu-host-before"))
    table = markdown_table(
        ["model", "step", "ms", "launches", "ms without graphs", "launches", "ms before", "launches"],
        [
            [
                model,
                _WORDS[kind],
                *_cells(row),
                *_cells(now[model, kind, False]),
                *_cells(before.get((model, kind, True))),
            ]
            for (model, kind, has_graphs), row in now.items()
            if has_graphs
        ],
    )
    return {"gpu-host-time": dated(table, "gpu-host-time")}


def _rows(results: dict[str, Any]) -> dict[tuple[str, str, bool], dict[str, Any]]:
    return {(row["model"], row["step"], row["graphs"]): row for row in results["steps"]}


def _cells(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["-", "-"]
    return [f"{row['step_ms']:.2f}", str(row["triton_launches"] + row["torch_operators"])]
