"""Flags that say which server a command talks to, and the client they give."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

    from octavo.client import Client

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add_address(group)
    group.add_argument("--api-key", metavar="KEY", help="sent as `authorization: Bearer KEY`")
    add_tls_arguments(group)


def add_address(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--address", type=address, default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="default: %(default)s"
    )


def address(text: str) -> str:
    """An address as gRPC takes it. Raises ArgumentTypeError for what has no port, which would be looked up for long."""
    host, _, port = text.rpartition(":")
    if not text.startswith("unix:") and not (host and port.isdecimal() and int(port) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return text


def add_tls_arguments(group: argparse._ActionsContainer) -> None:
    group.add_argument("--tls", action="store_true", help="use TLS, trusting the system's authorities")
    group.add_argument("--tls-ca-file", metavar="FILE", help="use TLS, trusting these authorities (PEM)")
    group.add_argument("--tls-client-cert-file", metavar="FILE", help="show this certificate to the server (PEM)")
    group.add_argument("--tls-client-key-file", metavar="FILE", help="its key (PEM)")


def credentials(arguments: argparse.Namespace) -> grpc.ChannelCredentials | None:
    """None: without TLS."""
    files = (arguments.tls_ca_file, arguments.tls_client_cert_file, arguments.tls_client_key_file)
    if not (arguments.tls or any(files)):
        return None
    from octavo.cli import CommandError
    from octavo.client import channel_credentials

    try:
        return channel_credentials(*files)
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from None


@contextmanager
def connect(arguments: argparse.Namespace) -> Iterator[Client]:
    """A client that reports a server that is not there at once, but waits for one that is lost on the way."""
    from octavo.cli import CommandError
    from octavo.client import Client
    from octavo.errors import RequestFailed
    from octavo.generation import RetryPolicy

    retry = RetryPolicy(retries_before_admission=0)
    with Client(
        arguments.address, api_key=arguments.api_key, credentials=credentials(arguments), retry=retry
    ) as client:
        try:
            yield client
        except RequestFailed as error:
            if "failed to connect" not in error.message.lower():
                raise
            raise CommandError(
                f"no server answers at {arguments.address} (`octavo serve` starts one, --address names another)"
            ) from None
