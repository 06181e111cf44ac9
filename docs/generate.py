"""Writes what the pages take from elsewhere: figures, plots, options, folders. `python -m docs.generate`.

A page holds such a part between `<!-- NAME -->` and `<!-- end -->`. tests/test_docs.py compares.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from benchmarks import figures_page, pool_figures_page, scaling
from docs import idea_pictures
from gateway_svc.config import GatewayConfig
from octavo.serving_plan import ServeConfig
from octavo.shared.options import Described, described
from scheduler_svc.config import SchedulerConfig
from tests.test_imports import ROOMS
from worker_svc.config import WorkerConfig

DOCS = Path(__file__).parent
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
PICTURES = DOCS / "pictures"
_BLOCK = re.compile(r"<!-- (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def page(text: str, made: dict[str, str]) -> str:
    """The text with each of its blocks made anew. Raises KeyError for a block that nobody makes."""
    return _BLOCK.sub(lambda found: f"<!-- {found['name']} -->\n\n{made[found['name']]}\n\n<!-- end -->", text)


def names_of_blocks(text: str) -> list[str]:
    """Of the generated parts of a page, in their order."""
    return [found["name"] for found in _BLOCK.finditer(text)]


def blocks() -> dict[str, str]:
    """Everything that is generated, by name."""
    return {
        **figures_page.blocks(),
        **pool_figures_page.blocks(),
        "rooms": "\n\n".join(_rooms(package) for package in ROOMS),
        "serve-options": _options(ServeConfig),
        "scheduler-options": _options(SchedulerConfig),
        "worker-options": _options(WorkerConfig),
        "gateway-options": _options(GatewayConfig),
    }


def _rooms(package: str) -> str:
    """What each folder and file of a package is for, by their own first sentence; lowest first."""
    lines = [
        f"**`{package}/`**, lowest first",
        "",
        "| | what it holds | and what it does not, or what else to know |",
        "| --- | --- | --- |",
    ]
    for room in ROOMS[package]:
        folder = DOCS.parent / package / room
        source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        first, _, rest = text.partition("\n\n")
        name = f"`{package}/{room}/`" if folder.is_dir() else f"`{package}/{room}.py`"
        cells = (first, rest.partition("\n\n")[0] if folder.is_dir() else "")
        lines.append("| " + " | ".join([name, *(" ".join(cell.split()).replace("|", "\\|") for cell in cells)]) + " |")
    return "\n".join(lines)


def _options(cls: type) -> str:
    """One table a group, in the order of --help."""
    groups: dict[str, list[str]] = {}
    for each in described(cls):
        groups.setdefault(each.group, []).append(_row(each))
    head = "| option | values | default | |\n| --- | --- | --- | --- |"
    return "\n\n".join("\n".join([f"**{group}**", "", head, *rows]) for group, rows in groups.items())


def _row(each: Described) -> str:
    cells = (f"`{each.flag}`", each.values, each.default, each.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def draw(folder: Path) -> None:
    """Writes every picture that is made: plots of figures, and the pictures of ideas."""
    for name, svg in idea_pictures.pictures().items():
        (folder / name).write_text(svg, encoding="utf-8")
    figures_page.draw(folder / "engines.svg")
    scaling.draw(figures_page.newest("scaling"), figures_page.newest("routing"), folder)


def main() -> None:
    """Rewrites every page and every picture in place."""
    draw(PICTURES)
    made = blocks()
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
