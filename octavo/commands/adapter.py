"""`octavo adapter`: loads low-rank adapters into a server's workers, lists and unloads them, while it serves."""

from __future__ import annotations

import argparse
import json

from octavo.commands.flags import connection
from octavo.shared.terminal_text import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A parser for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|load|unload")
    listing = actions.add_parser("list", help="adapters that requests may name")
    load = actions.add_parser("load", help="load an adapter into all workers that take adapters")
    unload = actions.add_parser("unload", help="unload one, once requests that use it have ended")
    for action in (load, unload):
        action.add_argument("name", metavar="NAME", help="what requests call it")
    load.add_argument("path", metavar="PATH", help="folder with adapter_config.json, as the workers see it")
    for action in (listing, load, unload):
        action.add_argument("--json", action="store_true", help="print JSON")
        connection.add_arguments(action)


def run(arguments: argparse.Namespace) -> int:
    """Returns when it is done on every worker; raises RequestFailed with what a worker says."""
    with connection.connect(arguments) as client:
        if arguments.action == "list":
            names = list(client.model_info().adapters)
            say(json.dumps(names) if arguments.json else "\n".join(names) or "none")
            return 0
        if arguments.action == "load":
            generation = client.load_adapter(arguments.name, arguments.path)
            said = {"name": arguments.name, "generation": generation}
        else:
            client.unload_adapter(arguments.name)
            said = {"name": arguments.name}
    print(json.dumps(said) if arguments.json else f"{arguments.name} is {arguments.action}ed")
    return 0
