"""`octavo worker`: a worker service in this process."""

from __future__ import annotations

import argparse
import gc
import os

from octavo.shared.options import add_arguments as add_options
from octavo.shared.options import add_position, from_namespace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of `WorkerConfig`; the model may be a position, too."""
    from worker_svc.config import WorkerConfig

    parser.usage = "octavo worker [MODEL] [options]"
    add_options(parser, WorkerConfig)
    add_position(parser, "model")


def run(arguments: argparse.Namespace) -> int:
    """Loads the model and serves until it is told to stop. Raises BindError where its port is taken."""
    from octavo.serving.plan import waiting_threads
    from octavo.shared.ports import check_port_is_free
    from worker_svc.config import WorkerConfig

    config = from_namespace(WorkerConfig, arguments)
    if config.num_ranks == 1 or os.environ.get("RANK", "0") == "0":  # other ranks listen on none
        check_port_is_free(config.host, config.port)  # before torch is imported, which takes seconds
    os.environ.update(waiting_threads())
    # Until the worker is ready. What is imported and loaded stays, and looking at it again and again for garbage took a
    # quarter of 1.5 s of imports.
    gc.disable()
    from worker_svc.server import main

    return main(config)
