"""`octavo keys`: makes keys for a server's keys file, lists and removes them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from octavo.shared.options import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A parser for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|remove")
    add = actions.add_parser("add", help="draw a key, write its hash into the file, and print the key this once")
    listing = actions.add_parser("list", help="names, tenants and roles")
    remove = actions.add_parser("remove", help="take a key out of the file: it is refused within a second or two")
    for action in (add, listing, remove):
        action.add_argument("file", type=Path, metavar="FILE", help="the --keys-file of schedulers")
    for action in (add, remove):
        action.add_argument("name", metavar="NAME", help="of the key, as logs have it")
    for action in (add, listing, remove):
        action.add_argument("--json", action="store_true", help="print JSON")
    add.add_argument("--tenant", metavar="TENANT", help="whose requests it sends (default: NAME)")
    add.add_argument(
        "--role",
        action="append",
        choices=("inference", "control", "metrics"),
        help="what it is for; repeatable (default: inference)",
    )
    add.add_argument(
        "--prefixes", metavar="GROUP", help="shares cached prefixes with keys of the same group (default: TENANT)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises OptionError for a file that cannot be used."""
    from octavo.shared.keys import KeysFileError, alone_with

    path: Path = arguments.file
    try:
        if arguments.action == "list":
            _print_all(path, as_json=arguments.json)
            return 0
        with alone_with(path):
            _change(path, arguments)
        return 0
    except KeysFileError as error:
        raise OptionError(str(error)) from None
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None


def _change(path: Path, arguments: argparse.Namespace) -> None:
    from octavo.shared.keys import read_entries, read_keys, write_entries

    is_new = arguments.action == "add" and not path.exists()
    if not is_new:
        read_keys(path)  # one that no server would take is not written to
    entries = [] if is_new else read_entries(path)
    if arguments.action == "add":
        _add(arguments, entries)
        return
    left = [entry for entry in entries if entry["name"] != arguments.name]
    if len(left) == len(entries):
        raise OptionError(f"{path} has no key {arguments.name!r}")
    write_entries(path, left)
    print(json.dumps({"name": arguments.name}) if arguments.json else f"{arguments.name} is removed")


def _add(arguments: argparse.Namespace, entries: list[dict[str, object]]) -> None:
    from octavo.shared.keys import check_entries, hash_of, new_key, write_entries

    key = new_key()
    entry: dict[str, object] = {
        "name": arguments.name,
        "sha256": hash_of(key),
        "roles": arguments.role or ["inference"],
    }
    for field in ("tenant", "prefixes"):
        if (value := getattr(arguments, field)) is not None:
            entry[field] = value
    check_entries([*entries, entry], str(arguments.file))
    write_entries(arguments.file, [*entries, entry])
    print(json.dumps({"name": arguments.name, "key": key}) if arguments.json else key)


def _print_all(path: Path, *, as_json: bool) -> None:
    from octavo.shared.keys import read_keys

    callers = list(read_keys(path).values())
    if as_json:
        fields = [
            {"name": c.name, "tenant": c.tenant, "roles": sorted(c.roles), "prefixes": c.prefixes} for c in callers
        ]
        print(json.dumps(fields))
        return
    for caller in callers:
        print(f"{caller.name}  tenant {caller.tenant}  {' '.join(sorted(caller.roles))}")
