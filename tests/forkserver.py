"""Processes that are up within a second: forked from one that has imported everything which a worker needs.

What they run is the command itself, with a process id, sockets and threads of its own; only the imports, which take
more processor time than all else that a worker of a tiny model does before it is ready, are shared.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver

from octavo.serving_plan import waiting_threads

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["worker_svc.server", "numba"])  # no kernel: OpenMP must not have begun before a fork


def start() -> None:
    """With a worker's environment: how threads wait for one another is read when OpenMP is loaded."""
    before = dict(os.environ)
    os.environ.update(waiting_threads())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_command(arguments: list[str], stderr: int) -> None:
    """In the process that was forked: `octavo ARGUMENTS`, which says what it says to `stderr`."""
    os.dup2(stderr, sys.stderr.fileno())
    from octavo.cli import main

    sys.exit(main(arguments))
