"""README and docs/: what is generated is as it would be generated now, and names, links and commands lead somewhere."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from docs import generate
from gateway_svc.upstream.statuses import http_error
from octavo.cli import COMMANDS
from octavo.errors import RequestFailed
from octavo.sampling_params import SamplingParams
from octavo.shared.command_line import Parser
from scheduler_svc.api.metrics_exporter import EngineCollector
from tests.pages import PAGES, ROOT, commands_of
from tests.scheduler.hand_turned_loop import Loop

DOCS = [path for path in generate.PAGES if path.parent.name == "docs"]
TOP_FOLDERS = "octavo|scheduler_svc|worker_svc|kernels|protos|tests|benchmarks|deploy|docs|examples"
PATH = re.compile(rf"`((?:{TOP_FOLDERS})/[\w./-]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[\w-]+)?\)")
EXAMPLES = {"docs/adding-a-kernel.md", "docs/adding-a-model.md"}  # name files that their reader is to make


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


@pytest.mark.parametrize("name", PAGES)
def test_modules_exist(name: str) -> None:
    def is_there(module: str) -> bool:
        path = ROOT.joinpath(*module.split("."))
        holder = path.parent.with_suffix(".py")  # of a function or class
        return (
            path.is_dir() or path.with_suffix(".py").exists() or (holder.exists() and path.name in holder.read_text())
        )

    named = re.findall(r"`((?:kernels|benchmarks|scheduler_svc|worker_svc|gateway_svc)(?:\.\w+)+)", PAGES[name])
    assert [module for module in named if not is_there(module) and name not in EXAMPLES] == []


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
    lines = commands_of(PAGES[name]) + re.findall(r"`(octavo [^`]+)`", PAGES[name])
    commands = [line for line in lines if line.startswith("octavo ")]
    for words in (shlex.split(re.sub(r"\s+(\.\.\.|[|>].*)$", "", command))[1:] for command in commands):
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


def test_pages_are_a_site_without_a_lost_link(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stdout + built.stderr
    made = {path.relative_to(tmp_path / "site").parts[0] for path in (tmp_path / "site").rglob("index.html")}
    assert made == {"index.html", *(path.stem for path in DOCS if path.stem != "index")}
    loaded = re.findall(r'(?:src|href)="(https?://[^"]*)"', (tmp_path / "site/index.html").read_text(encoding="utf-8"))
    assert [url for url in loaded if "zensical" not in url] == []  # the mention of what made it


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(menu) == sorted(path.name for path in DOCS)


def test_the_page_of_sampling_has_every_field_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", PAGES["docs/sampling.md"], flags=re.MULTILINE))
    said = {"none": None, "drawn": None, "`n`": None, "all that fit": None}
    ours = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    lists = {name for name, default in ours.items() if default == ()}
    wrong = {
        name: (rows.get(name), default)
        for name, default in ours.items()
        if rows.get(name) != ("none" if name in lists else str(default)) and said.get(rows.get(name, ""), 0) != default
    }
    assert wrong == {} and rows.keys() == ours.keys()


def test_errors_have_the_statuses_that_the_page_of_serving_says() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \| (\d+) \|", PAGES["docs/serving.md"], flags=re.MULTILINE)
    refused = [(name, http_error(RequestFailed(grpc.StatusCode[name], ""), {}).status) for name, _ in rows]
    assert refused == [(name, int(status)) for name, status in rows] != []


def test_errors_have_the_statuses_and_codes_that_the_page_of_the_gateway_says() -> None:
    table = PAGES["docs/openai.md"].split("\n## Errors\n")[1].split("\n## ")[0]
    said = {
        int(status): {word.strip("`") for word in codes.split(", ")}
        for status, codes in re.findall(r"^\| (\d+) \| ([^|]+) \|", table, flags=re.MULTILINE)
    }
    failures = [RequestFailed(code, "") for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    for words in ("Received message larger than max", "received metadata size exceeds hard limit"):
        failures.append(RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, words))
    for error in [http_error(failure, {}) for failure in failures]:
        assert (error.code or "none") in said[error.status], (error.status, error.code)
