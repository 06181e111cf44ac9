"""One number that a section found out, and how it travels: a JSON line a figure, written when it is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit; `goal` in words, `is_goal_met` None where there is none."""

    section: str
    name: str
    value: float | None  # None: it could not be measured, and `detail` says why
    unit: str = ""
    goal: str = ""
    is_goal_met: bool | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Report = Callable[[Figure], None]


def write(path: Path, figure: Figure) -> None:
    """Appends to a file of figures, so that a later failure loses nothing."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(figure)) + "\n")


def read(path: Path) -> list[Figure]:
    """The figures of a file, in the order in which they were found; none where there is no file."""
    if not path.exists():
        return []
    return [Figure(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def value_of(figures: Sequence[Figure], name: str) -> float | None:
    """The value of the figure of that name; None where it was not measured."""
    return next((figure.value for figure in figures if figure.name == name), None)


_MET = {True: "yes", False: "no", None: "-"}


def table(figures: Sequence[Figure]) -> str:
    """A Markdown table, a row a figure."""
    rows = [("part", "what", "value", "goal", "met"), ("---",) * 5]
    for one in figures:
        value = "not measured" if one.value is None else f"{one.value:,.4g} {one.unit}".strip()
        rows.append((one.section, one.name, value, one.goal or "-", _MET[one.is_goal_met]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
