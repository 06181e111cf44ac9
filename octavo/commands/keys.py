"""`octavo keys`: makes keys for a server's keys file, lists and removes them, and says what tenants may have."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.shared.access.tenant_limits import LIMITS
from octavo.shared.options import OptionError

_HELP = (
    "requests a minute, a minute's worth of them at once after a pause",
    "prompt and generated tokens a minute, likewise",
    "sequences that run at once; more wait",
    "requests that may wait so; more are refused",
    "bytes of its requests that have not ended",
)
_NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A parser for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|remove|limit")
    add = actions.add_parser("add", help="draw a key, write its hash into the file, and print the key this once")
    listing = actions.add_parser("list", help="names, tenants and roles, and what tenants may have")
    remove = actions.add_parser("remove", help="take a key out of the file: it is refused within a second or two")
    limit = actions.add_parser("limit", help="say what a tenant may have: in force within a second or two")
    for action in (add, listing, remove, limit):
        action.add_argument("file", type=Path, metavar="FILE", help="the --keys-file of schedulers")
    for action in (add, remove):
        action.add_argument("name", metavar="NAME", help="of the key, as logs have it")
    whose = limit.add_mutually_exclusive_group(required=True)
    whose.add_argument("tenant", nargs="?", metavar="TENANT", help="whose keys and tokens share the limits")
    whose.add_argument("--default", action="store_true", help="each tenant that the file does not name")
    limit.add_argument("--weight", metavar="WEIGHT", help="its share under fair, or none")
    for name, what in zip(LIMITS, _HELP, strict=True):
        limit.add_argument(f"--{name.replace('_', '-')}", metavar="N", help=f"{what}, or none")
    for action in (add, listing, remove, limit):
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
    from octavo.shared.access.keys import KeysFileError, alone_with

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
    from octavo.shared.access.keys import check_sections, read_sections, write_sections

    is_new = arguments.action != "remove" and not path.exists()  # one of limits alone is for those who bring tokens
    sections: dict[str, Any] = {"keys": []} if is_new else read_sections(path)
    check_sections(sections, str(path))  # one that no server would take is not written to
    change = {"add": _add, "remove": _remove, "limit": _limit}[arguments.action]
    changed, said, told = change(arguments, sections)
    check_sections(changed, str(path))
    write_sections(path, changed)
    print(json.dumps(told) if arguments.json else said)


_Changed = tuple[dict[str, Any], str, dict[str, Any]]  # the sections, what is printed, and as JSON


def _add(arguments: argparse.Namespace, sections: dict[str, Any]) -> _Changed:
    from octavo.shared.access.keys import hash_of, new_key

    for number, former in enumerate(sections["keys"]):
        if former["name"] == arguments.name:
            raise OptionError(f"{arguments.file}: keys[{number}] has the name {arguments.name!r}; take another one")
    key = new_key()
    entry: dict[str, object] = {
        "name": arguments.name,
        "sha256": hash_of(key),
        "roles": arguments.role or ["inference"],
    }
    for field in ("tenant", "prefixes"):
        if (value := getattr(arguments, field)) is not None:
            entry[field] = value
    return {**sections, "keys": [*sections["keys"], entry]}, key, {"name": arguments.name, "key": key}


def _remove(arguments: argparse.Namespace, sections: dict[str, Any]) -> _Changed:
    left = [entry for entry in sections["keys"] if entry["name"] != arguments.name]
    if len(left) == len(sections["keys"]):
        raise OptionError(f"{arguments.file} has no key {arguments.name!r}")
    return {**sections, "keys": left}, f"{arguments.name} is removed", {"name": arguments.name}


def _limit(arguments: argparse.Namespace, sections: dict[str, Any]) -> _Changed:
    """Changes what is named, and keeps the other limits of the tenant; an entry without any is taken away."""
    wanted = {name: getattr(arguments, name) for name in ("weight", *LIMITS)}
    wanted = {name: text for name, text in wanted.items() if text is not None}
    if not wanted:
        raise OptionError(f"nothing to change: --{', --'.join(('weight', *LIMITS)).replace('_', '-')}")
    if arguments.default:
        former = dict(sections.get("default", {}))
    else:
        entries = [dict(entry) for entry in sections.get("tenants", [])]
        former = next((entry for entry in entries if entry["name"] == arguments.tenant), {"name": arguments.tenant})
    changed = {**former, **{name: _number(name, text) for name, text in wanted.items() if text != _NONE}}
    for name in [name for name, text in wanted.items() if text == _NONE]:
        changed.pop(name, None)
    if arguments.default:
        after = {**sections, "default": changed}
    else:
        others = [entry for entry in entries if entry["name"] != arguments.tenant]
        after = {**sections, "tenants": [*others, changed] if len(changed) > 1 else others}
    after = {name: section for name, section in after.items() if section or name == "keys"}
    limits = {name: value for name, value in changed.items() if name != "name"}
    who = "default" if arguments.default else arguments.tenant
    return after, f"{who}: {_shown(limits)}", {"tenant": arguments.tenant, **limits}


def _number(name: str, text: str) -> float | int:
    try:
        return float(text) if name == "weight" else int(text)
    except ValueError:
        raise OptionError(f"--{name.replace('_', '-')} is {text!r}; a number or {_NONE} is accepted") from None


def _shown(limits: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in limits.items()) or "no limits"


def _print_all(path: Path, *, as_json: bool) -> None:
    from octavo.shared.access.keys import check_sections, read_sections

    sections = read_sections(path)
    callers = list(check_sections(sections, str(path)).callers.values())
    tenants = {entry["name"]: {**entry} for entry in sections.get("tenants", [])}
    default: dict[str, Any] = sections.get("default", {})
    for entry in tenants.values():
        del entry["name"]
    if as_json:
        fields = [
            {
                "name": c.name,
                "tenant": c.tenant,
                "roles": sorted(c.roles),
                "prefixes": c.prefixes,
                "limits": tenants.get(c.tenant, default),
            }
            for c in callers
        ]
        print(json.dumps(fields))
        return
    for caller in callers:
        print(f"{caller.name}  tenant {caller.tenant}  {' '.join(sorted(caller.roles))}")
    for tenant, limits in tenants.items():
        print(f"tenant {tenant}  {_shown(limits)}")
    if default:
        print(f"other tenants  {_shown(default)}")
