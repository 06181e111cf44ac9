"""`octavo top`: what a server does right now: models with their queues, workers with their caches, requests."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from octavo.commands.flags import connection
from octavo.commands.flags.numbers import count

if TYPE_CHECKING:
    import grpc

    from octavo.dashboard.server_watch import ServerWatch, View

_PIPE_WIDTH = 240  # columns, where no terminal says how wide it is
_FIRST_LOOK_S = 0.25  # between the two looks of `--once`: speeds are of what happens between them
_KEYS = "q ends   space holds the picture   r hides or shows requests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How often to look, what to show, and at which server."""
    parser.epilog = f"keys: {_KEYS}"
    parser.add_argument(
        "--interval", type=connection.seconds, default=1.0, metavar="SECONDS", help="default: %(default)s"
    )
    parser.add_argument(
        "--requests", type=count(1000, 0), default=10, metavar="N", help="the oldest ones (default: 10)"
    )
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each look")
    connection.add_address(parser)
    connection.add_key_arguments(parser)
    connection.add_tls_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Draws the state again and again until `q` or Ctrl-C; raises CommandError where no server answers."""
    import grpc

    from octavo.cli import CommandError
    from octavo.dashboard.server_watch import ServerWatch
    from octavo.shared.rpc import client_options

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not have every character
    credentials, metadata = connection.credentials(arguments), connection.metadata(arguments)
    options = client_options(arguments.address)
    channel = (
        grpc.insecure_channel(arguments.address, options)
        if credentials is None
        else grpc.secure_channel(arguments.address, credentials, options)
    )
    try:
        with channel, ServerWatch(channel, arguments.requests, metadata) as watch:
            watch.look()  # speeds are of what happens between two looks
            if sys.stdout.isatty() and not (arguments.json or arguments.once):
                _draw(watch, arguments)
            else:
                _print(watch, arguments)
    except grpc.RpcError as error:
        raise CommandError(_why(arguments, error)) from None
    return 0


def _draw(watch: ServerWatch, arguments: argparse.Namespace) -> None:
    """On a screen of its own, which is gone at the end."""
    import grpc
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from octavo.dashboard import keys
    from octavo.dashboard.screen import screen
    from octavo.shared.terminal_text import harmless

    foot = Text(f"\n{_KEYS}", style="dim")
    is_held = hides_requests = False
    shown: RenderableType = Text("looking")
    next_look_s = time.monotonic()
    with keys.unbuffered(), Live(screen=True, auto_refresh=False) as live:
        while True:
            if time.monotonic() >= next_look_s and not is_held:
                next_look_s = time.monotonic() + arguments.interval
                try:
                    view = watch.look()
                    if hides_requests:
                        view.requests.clear()
                    shown, problem = screen(view, arguments.address), ""
                except grpc.RpcError as error:  # it may come back
                    problem = _why(arguments, error)
                live.update(Group(shown, Text(harmless(problem), style="red"), foot), refresh=True)
            left_s = next_look_s - time.monotonic()
            key = keys.pressed(max(left_s, 0.0) if not is_held else arguments.interval)
            if key == "q":
                return
            is_held ^= key == " "
            hides_requests ^= key == "r"


def _print(watch: ServerWatch, arguments: argparse.Namespace) -> None:
    """A look below the other: tables as wide as they need to be, or JSON."""
    from rich.console import Console

    from octavo.dashboard.screen import screen

    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    while True:
        time.sleep(min(arguments.interval, _FIRST_LOOK_S) if arguments.once else arguments.interval)
        view = watch.look()
        if arguments.json:
            print(json.dumps(_as_dict(view)), flush=True)
        else:
            console.print(screen(view, arguments.address))
        if arguments.once:
            return


def _as_dict(view: View) -> dict[str, Any]:
    """The messages of `Control` by their names there, and speeds by worker."""
    import dataclasses

    from google.protobuf.json_format import MessageToDict

    def plain(message: Any) -> dict[str, Any]:
        return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    return {
        "version": view.info.version,
        "uptime_s": view.info.uptime_ns / 1e9,
        **plain(view.load),
        "requests": [plain(each) for each in view.requests],
        "per_second": {address: dataclasses.asdict(speed) for address, speed in view.speeds.items()},
    }


def _why(arguments: argparse.Namespace, error: grpc.RpcError) -> str:
    code, details = error.code().name, error.details() or ""
    if code == "UNIMPLEMENTED":
        details += " (Control may have a port of its own there: --control-port of the scheduler)"
    return connection.connection_failure(arguments, details) or f"{arguments.address}: {code}: {details}"
