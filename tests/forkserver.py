"""Processes that are up within a second: forked from one that has imported everything which they need.

What they run is the command itself, with a process id, sockets and threads of its own; only the imports, which take
more processor time than all else that a worker of a tiny model or a scheduler does before it is ready, are shared.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from octavo.serving_plan import waiting_threads

CONTEXT = multiprocessing.get_context("forkserver")
# No kernel: OpenMP must not have begun before a fork.
CONTEXT.set_forkserver_preload(["worker_svc.server", "numba", "scheduler_svc.server", "octavo.commands.scheduler"])
WITHOUT_TORCH = ("torch", "triton", "numba", "transformers")  # what a scheduler must never import


def start() -> None:
    """With a worker's environment: how threads wait for one another is read when OpenMP is loaded."""
    before = dict(os.environ)
    os.environ.update(waiting_threads())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class ForkedCommand:
    """`octavo ARGUMENTS`, with what tests need of a `subprocess.Popen`.

    `stderr`: a descriptor that it gets as its own. `missing`: modules that raise ImportError there from now on.
    """

    def __init__(self, arguments: Sequence[str], stderr: int = 2, missing: Sequence[str] = ()) -> None:
        self.args = list(arguments)
        start()
        with Connection(os.dup(stderr), readable=False) as said:
            self._process = CONTEXT.Process(
                target=_run, args=(self.args, dict(os.environ), said, tuple(missing)), daemon=True
            )
            self._process.start()
        self._one_at_a_time = threading.Lock()  # the exit code can be read once

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._one_at_a_time:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        with self._one_at_a_time:
            self._process.join(timeout)
            if self._process.exitcode is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], environment: dict[str, str], said: Connection, missing: tuple[str, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)  # a test may have set a folder for caches
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment]  # so an import of it fails
    run_command(arguments, said.fileno())


def run_command(arguments: list[str], stderr: int) -> None:
    """In the process that was forked: `octavo ARGUMENTS`, which says what it says to `stderr`."""
    os.dup2(stderr, sys.stderr.fileno())
    from octavo.cli import main

    sys.exit(main(arguments))
