"""`octavo scheduler`: the scheduler service in this process."""

from __future__ import annotations

import argparse

from octavo.shared.options import add_arguments as add_options
from octavo.shared.options import from_namespace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of `SchedulerConfig`."""
    from scheduler_svc.config import SchedulerConfig

    parser.usage = "octavo scheduler [options]"
    add_options(parser, SchedulerConfig)


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is told to stop; exit code 0 then."""
    from scheduler_svc.config import SchedulerConfig

    config = from_namespace(SchedulerConfig, arguments)
    from scheduler_svc import server

    return server.main(config)
