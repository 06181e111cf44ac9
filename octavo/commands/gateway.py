"""`octavo gateway`: OpenAI's API over HTTP, in front of a scheduler."""

from __future__ import annotations

import argparse

from octavo.shared.options import add_arguments as add_options
from octavo.shared.options import from_namespace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the service."""
    from gateway_svc.config import GatewayConfig

    parser.usage = "octavo gateway [options]"
    add_options(parser, GatewayConfig)


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is told to end."""
    from gateway_svc.config import GatewayConfig

    config = from_namespace(GatewayConfig, arguments)
    from gateway_svc import server

    return server.main(config)
