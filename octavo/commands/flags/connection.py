"""Flags that say which server a command talks to, and the client they give."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from octavo.commands.flags.tls_failures import tls_failure
from octavo.shared.options import OptionError
from octavo.shared.ports import is_loopback
from octavo.shared.terminal_text import say

if TYPE_CHECKING:
    import ssl

    import grpc

    from octavo.client import Client
    from octavo.retrying import RetryPolicy, Waiting

T = TypeVar("T")

RETRY_WINDOW = "OCTAVO_RETRY_WINDOW"
API_KEY = "OCTAVO_API_KEY"
DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For commands that send requests: addresses, how long to go on trying, TLS."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--address",
        type=addresses,
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="server; with several, separated by commas, the next one is used when one is lost (default: %(default)s)",
    )
    group.add_argument(
        "--retry-window",
        type=seconds,
        metavar="SECONDS",
        help=f"how long to wait for a server that is lost or not there yet (default: ${RETRY_WINDOW}, else 120 for"
        " requests that have begun and 0 for others)",
    )
    add_key_arguments(group)
    add_tls_arguments(group)


def add_optional_address(parser: argparse.ArgumentParser, what: str) -> None:
    """For a command that asks a server only where one is named: `connect` where `address` is not None."""
    group = parser.add_argument_group("server")
    group.add_argument("--address", type=addresses, metavar="HOST:PORT", help=what)
    add_key_arguments(group)
    add_tls_arguments(group)
    parser.set_defaults(retry_window=None)


def add_address(group: argparse._ActionsContainer) -> None:
    """For commands that ask one server and do not try again."""
    group.add_argument(
        "--address", type=address, default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="default: %(default)s"
    )


def address(text: str) -> str:
    """An address as gRPC takes it. Raises ArgumentTypeError for what has no port, which would be looked up for long."""
    host, _, port = text.rpartition(":")
    if not text.startswith("unix:") and not (host and port.isdecimal() and int(port) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return text


def addresses(text: str) -> str:
    """One or more, with commas between them. Raises ArgumentTypeError."""
    return ",".join(address(each.strip()) for each in text.split(","))


def seconds(text: str) -> float:
    """Raises ArgumentTypeError for what is no number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def retry_policy(arguments: argparse.Namespace) -> RetryPolicy:
    """A server that is not there at first is reported at once, unless how long to wait was said. Raises OptionError."""
    from octavo.retrying import RetryPolicy

    if (window_s := retry_window(arguments)) is None:
        return RetryPolicy(window_before_admission_s=0.0, on_wait=_tell)
    return RetryPolicy(window_s=window_s, on_wait=_tell)


def retry_window(arguments: argparse.Namespace) -> float | None:
    """Seconds, of the command line, else of the environment; None: nobody has said. Raises OptionError."""
    window_s: float | None = arguments.retry_window
    if window_s is None and (told := os.environ.get(RETRY_WINDOW)):
        try:
            return seconds(told)
        except argparse.ArgumentTypeError as error:
            raise OptionError(f"{RETRY_WINDOW}: {error}") from None
    return window_s


def _tell(waiting: Waiting) -> None:
    if waiting.is_first:
        say(f"(waiting for the server, for up to {waiting.left_s:.0f} s: {waiting.failure})", sys.stderr)


def add_key_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the flags that `metadata` and `connect` read."""
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"sent as `authorization: Bearer KEY` (default: ${API_KEY}, which other users of this machine do not see)",
    )
    group.add_argument(
        "--plaintext-key", action="store_true", help="send the key to another machine without TLS, for all to read"
    )


def api_key(arguments: argparse.Namespace) -> str | None:
    """The key of the command line, or that of the environment. Raises OptionError for what can be none."""
    from octavo.calls.addresses import check_key

    key = arguments.api_key or os.environ.get(API_KEY) or None
    if key is not None:
        try:
            check_key(key)
        except ValueError as error:
            raise OptionError(str(error)) from None
    return key


def api_key_for(url: str, arguments: argparse.Namespace) -> str | None:
    """Likewise, to be sent to this URL. Raises OptionError where that would show it to the network."""
    key, parts = api_key(arguments), urlsplit(url)
    if key and parts.scheme != "https" and not (arguments.plaintext_key or is_loopback(parts.hostname or "")):
        raise OptionError(
            f"api_key: {url} is another machine, which it would reach as plain text; https, or --plaintext-key"
        )
    return key


def metadata(arguments: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Of calls without an `octavo.Client`. Raises OptionError where they would show a key to the network."""
    from octavo.calls.addresses import check_may_send_key

    key = api_key(arguments)
    if key is None:
        return ()
    try:
        check_may_send_key(arguments.address, is_encrypted=uses_tls(arguments) or arguments.plaintext_key)
    except ValueError as error:
        raise OptionError(str(error)) from None
    return (("authorization", f"Bearer {key}"),)


def uses_tls(arguments: argparse.Namespace) -> bool:
    """Whether the server is spoken to over TLS."""
    files = (arguments.tls_ca_file, arguments.tls_client_cert_file, arguments.tls_client_key_file)
    return arguments.tls or any(files)


def add_tls_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the flags that `credentials` reads."""
    group.add_argument("--tls", action="store_true", help="use TLS, trusting the system's authorities")
    group.add_argument("--tls-ca-file", metavar="FILE", help="use TLS, trusting these authorities (PEM)")
    group.add_argument("--tls-client-cert-file", metavar="FILE", help="show this certificate to the server (PEM)")
    group.add_argument("--tls-client-key-file", metavar="FILE", help="its key (PEM)")


def credentials(arguments: argparse.Namespace) -> grpc.ChannelCredentials | None:
    """None: without TLS. Raises OptionError."""
    if not uses_tls(arguments):
        return None
    from octavo.shared.access.tls import client_credentials

    return _of_files(client_credentials, arguments)


def ssl_context(arguments: argparse.Namespace) -> ssl.SSLContext:
    """The same for https. Raises OptionError."""
    from octavo.shared.access.tls import client_context

    return _of_files(client_context, arguments)


def _of_files(make: Callable[..., T], arguments: argparse.Namespace) -> T:
    from octavo.shared.access.tls import TlsError

    files = (arguments.tls_ca_file, arguments.tls_client_cert_file, arguments.tls_client_key_file)
    try:
        return make(*(Path(file) if file else None for file in files))
    except TlsError as error:
        raise OptionError(f"TLS: {error}") from None


@contextmanager
def connect(arguments: argparse.Namespace) -> Iterator[Client]:
    """A client that reports a server that is not there at once, but waits for one that is lost on the way."""
    from octavo.cli import CommandError
    from octavo.client import Client
    from octavo.errors import RequestFailed

    retry = retry_policy(arguments)
    metadata(arguments)  # raises
    with Client(
        arguments.address,
        api_key=api_key(arguments),
        credentials=credentials(arguments),
        retry=retry,
        plaintext_key=arguments.plaintext_key,
    ) as client:
        try:
            yield client
        except RequestFailed as error:
            refused = "failed to connect" in error.message.lower()  # and it is not the server that says something
            if not refused or (why := connection_failure(arguments, error.message)) is None:
                raise
            raise CommandError(why) from None


def connection_failure(arguments: argparse.Namespace, details: str) -> str | None:
    """Why there is no connection, and what to do. None: it was something else. `details`: those of the status."""
    if (why := tls_failure(arguments.address, details)) is not None:
        return why
    if "failed to connect" not in details.lower():
        return None
    hint = "" if arguments.tls_ca_file else "; where it speaks TLS, --tls-ca-file says whom to trust"
    return f"no server answers at {arguments.address} (`octavo serve` starts one, --address names another{hint})"
