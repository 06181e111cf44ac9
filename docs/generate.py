"""Writes what the pages take from elsewhere: figures, plots, options, folders. `python -m docs.generate`.

A page holds such a part between `<!-- NAME -->` and `<!-- end -->`. tests/test_docs.py compares.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks import autoscaling_page, figures_page, gpu_host_page, gpu_page, pool_figures_page, scaling
from docs import idea_pictures
from gateway_svc.config import GatewayConfig
from octavo.arguments import vllm_arguments
from octavo.serving.plan import ServeConfig
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
        **gpu_host_page.blocks(),
        **gpu_page.blocks(),
        **autoscaling_page.blocks(),
        "rooms": "\n\n".join(_rooms(package) for package in ROOMS),
        "serve-options": _options(ServeConfig),
        "scheduler-options": _options(SchedulerConfig),
        "worker-options": _options(WorkerConfig),
        "gateway-options": _options(GatewayConfig),
        "vllm-llm": _arguments_of_llm(),
        "vllm-sampling": _elsewhere("argument of `SamplingParams`", vllm_arguments.OF_SAMPLING),
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


def _arguments_of_llm() -> str:
    """What becomes of each argument of vLLM's `LLM`."""
    others = [f"`{value}` is `{same}`" for each in vllm_arguments.SAME_VALUES.values() for value, same in each.items()]
    rows = [(_names(vllm_arguments.SAME_NAMES), f"the same; {', '.join(others)}")]
    rows += [(f"`{name}`", instead) for name, instead in vllm_arguments.INSTEAD.items()]
    return _elsewhere("argument of `LLM`", vllm_arguments.OF_LLM, [f"| {name} | {said} |" for name, said in rows])


def _elsewhere(head: str, table: tuple[vllm_arguments.Elsewhere, ...], rows: Sequence[str] = ()) -> str:
    """Names that vLLM has and Octavo has not."""
    lines = [f"| {head} | here |", "| --- | --- |", *rows]
    for each in table:
        but = ", ".join(f"`{value!r}`" for value in each.asks_for_nothing if not isinstance(value, str) or value != "1")
        what = "without effect" if each.any_value else f"refused, but for {but}" if but else "refused"
        lines.append(f"| {_names(each.names)} | {what}: {each.reason} |")
    return "\n".join(lines)


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _row(each: Described) -> str:
    cells = (f"`{each.flag}`", each.values, each.default, each.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def draw(folder: Path) -> None:
    """Writes every picture that is made: plots of figures, and the pictures of ideas."""
    for name, svg in idea_pictures.pictures().items():
        (folder / name).write_text(svg, encoding="utf-8")
    figures_page.draw(folder / "engines.svg")
    scaling.draw(figures_page.newest("scaling"), figures_page.newest("routing"), folder)
    autoscaling_page.draw(folder)


def main() -> None:
    """Rewrites every page and every picture in place."""
    draw(PICTURES)
    made = blocks()
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
