"""README and docs/: what is generated is as it would be generated now, and names, links and commands lead somewhere."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from docs import generate
from octavo.cli import COMMANDS
from octavo.shared.command_line import Parser
from scheduler_svc.api.metrics_exporter import EngineCollector
from tests.scheduler.hand_turned_loop import Loop

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in generate.PAGES}
TOP_FOLDERS = "octavo|scheduler_svc|worker_svc|kernels|protos|tests|benchmarks|deploy|docs|examples"
PATH = re.compile(rf"`((?:{TOP_FOLDERS})/[\w./-]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[\w-]+)?\)")
EXAMPLES = {"docs/adding-a-kernel.md", "docs/adding-a-model.md"}  # name files that their reader is to make


def code_of(text: str) -> list[str]:
    """The lines in blocks of code, continued ones joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (.*)$", text, flags=re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines() + "\n".join(indented).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines]


@pytest.mark.parametrize("name", PAGES)
def test_generated_parts_are_as_they_would_be_made_now(name: str) -> None:
    assert generate.page(PAGES[name], generate.blocks()) == PAGES[name], "python -m docs.generate"


def test_everything_generated_stands_in_one_place() -> None:
    standing = [name for text in PAGES.values() for name in generate.names_of_blocks(text)]
    assert sorted(standing) == sorted(generate.blocks())


def test_pictures_are_those_of_the_newest_results(tmp_path: Path) -> None:
    generate.draw(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert {name: (generate.PICTURES / name).read_text(encoding="utf-8") for name in drawn} == drawn
    assert [name for name in drawn if not any(f"pictures/{name})" in text for text in PAGES.values())] == []


@pytest.mark.parametrize("name", PAGES)
def test_paths_exist(name: str) -> None:
    paths = PATH.findall(PAGES[name])
    assert [path for path in paths if not (ROOT / path).exists() and name not in EXAMPLES] == []


def test_names_in_the_walk_through_the_tree_are_defined_in_their_files() -> None:
    walked = re.findall(
        r"^\| [\d.]+ \| [^|]* \| `([\w/.]+)` \| `(\w+)` \|", PAGES["docs/architecture.md"], flags=re.MULTILINE
    )
    assert len(walked) > 40
    defined = re.compile(r"^ *(?:async def|def|class) (\w+)", flags=re.MULTILINE)
    lost = [
        (path, name) for path, name in walked if name not in defined.findall((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert lost == []


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_pages_and_headings(name: str) -> None:
    lost = []
    for target, anchor in LINK.findall(PAGES[name]):
        path = ((ROOT / name).parent / target) if target else ROOT / name
        if not path.exists():
            lost.append(target)
        elif anchor and anchor[1:] not in anchors_of(path.read_text(encoding="utf-8")):
            lost.append(target + anchor)
    assert lost == []


def anchors_of(text: str) -> set[str]:
    """As hosting sites make them of headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [name for name in PAGES if name != "README.md"])
def test_a_page_has_a_contents_list_of_all_its_headings(name: str) -> None:
    contents = PAGES[name].partition("\nContents:")[2].partition("\n\n")[0]
    listed = {anchor[1:] for _, anchor in LINK.findall(contents)}
    sections = re.findall(r"^## (.*)$", PAGES[name], flags=re.MULTILINE)
    assert listed == anchors_of("\n".join(f"# {section}" for section in sections)) != set()


@pytest.mark.parametrize("name", PAGES)
def test_commands_parse(name: str) -> None:
    lines = code_of(PAGES[name]) + re.findall(r"`(octavo [^`]+)`", PAGES[name])
    commands = [line.partition(" # ")[0] for line in lines if line.startswith("octavo ")]
    for words in (shlex.split(re.sub(r"\s+(\.\.\.|>.*)$", "", command))[1:] for command in commands):
        assert words[0] in COMMANDS or words[0] == "COMMAND", words
        is_mention = len(words) <= 2 and not any(word.startswith("-") for word in words)  # `octavo model fetch`
        if not is_mention and not any(word.isupper() for word in words):  # MODEL stands for a model
            parser_of(words[0]).parse_args(words[1:])  # ends the process where it does not parse


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"octavo {command}")
    import_module(f"octavo.commands.{command}").add_arguments(parser)
    return parser


@pytest.mark.parametrize("name", PAGES)
def test_scripts_that_are_named_exist(name: str) -> None:
    modules = re.findall(r"python -m ((?:benchmarks|docs|tests|kernels|octavo)[\w.]*)", PAGES[name])
    assert [module for module in modules if find_spec(module) is None] == []


def test_metrics_are_those_of_the_exporter() -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(Loop().engine))
    told = re.findall(r"^# TYPE (octavo:\S+) (\w+)$", generate_latest(registry).decode(), flags=re.MULTILINE)
    shown = re.findall(r"^\| `(octavo:\w+)` \| (\w+) \|", PAGES["docs/metrics.md"], flags=re.MULTILINE)
    assert sorted(shown) == sorted(told)


def test_the_readme_is_short() -> None:
    prose = re.sub(r"^```.*?^```|<!--.*?-->", "", PAGES["README.md"], flags=re.MULTILINE | re.DOTALL)
    assert len(re.sub(r"\]\([^)]*\)", "]", prose).split()) <= 750
