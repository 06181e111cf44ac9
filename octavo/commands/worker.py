"""`octavo worker`: a worker service in this process."""

from __future__ import annotations

import argparse
import os

from octavo.options import add_arguments as add_options
from octavo.options import from_namespace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from worker_svc.config import WorkerConfig

    add_options(parser, WorkerConfig)


def run(arguments: argparse.Namespace) -> int:
    from octavo.serving_plan import waiting_threads
    from worker_svc.config import WorkerConfig

    config = from_namespace(WorkerConfig, arguments)
    os.environ.update(waiting_threads())
    from worker_svc.server import main

    return main(config)
