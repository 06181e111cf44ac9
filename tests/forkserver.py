"""Processes that are up within a second: forked from one that has imported everything which they need.

What they run is the command itself, with a process id, sockets and threads of its own; only the imports, which take
more processor time than all else that a worker of a tiny model or a scheduler does before it is ready, are shared.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from octavo.serving.plan import waiting_threads

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
WITHOUT_TORCH = ("torch", "triton", "transformers")  # what a scheduler must never import


def start() -> None:
    """With a worker's environment: how threads wait for one another is read when OpenMP is loaded."""
    before = dict(os.environ)
    os.environ.update(waiting_threads())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def address() -> str:
    """Where this process's server is asked, for others to `share` it. Started here, if it was not, it writes nothing to
    standard output, which may be a pipe whose reader waits for its end."""
    output, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        start()
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(nothing)
    found: str = _server()["_forkserver_address"]
    return found


def share(address: str) -> None:
    """Processes are forked by the server of another process, which outlives this one."""
    _server()["_forkserver_address"] = address
    _server()["_forkserver_alive_fd"], _ = os.pipe()  # what is forked gets one end: its own server would end with it
    is_there()


def is_there() -> None:
    """The server whose address this process has runs: the first process that it asks for would start another."""
    _server()["ensure_running"] = forkserver.__dict__["ensure_running"] = lambda: None


def _server() -> dict[str, Any]:
    state: dict[str, Any] = vars(forkserver._forkserver)
    return state


class ForkedCommand:
    """`octavo ARGUMENTS`, with what tests need of a `subprocess.Popen`.

    `stderr`: a descriptor that it gets as its own; `stdout`, too, where it is given. `missing`: modules that raise
    ImportError there from now on. `module`: another one whose `main` is run. `environment`: in place of ours.

    Its children are forked as well, unless `forks_children` is False.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        stderr: int = 2,
        missing: Sequence[str] = (),
        *,
        stdout: int | None = None,
        module: str = "octavo.cli",
        environment: Mapping[str, str] = os.environ,
        forks_children: bool = True,
    ) -> None:
        self.args = list(arguments)
        self._children: list[tuple[str, int]] = []
        self._born, births = connection.Pipe(duplex=False)
        start()
        with contextlib.ExitStack() as open_here, births:
            said, shown = (
                None if number is None else open_here.enter_context(Connection(os.dup(number), readable=False))
                for number in (stderr, stdout)
            )
            told = births if forks_children else None
            given = module, self.args, dict(environment), said, shown, tuple(missing), told
            self._process = CONTEXT.Process(target=_run, args=given, daemon=True)
            self._process.start()
        self._one_at_a_time = threading.Lock()  # the exit code can be read once

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def children(self, of: str = "") -> list[int]:
        """Process ids of all that it has forked, also of those that have ended: of a command or a module, if named."""
        with contextlib.suppress(EOFError):
            while self._born.poll():
                self._children.append(self._born.recv())
        return [pid for name, pid in self._children if of in ("", name)]

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


def _run(
    module: str,
    arguments: list[str],
    environment: Mapping[str, str],
    said: Connection,
    shown: Connection | None,
    missing: Sequence[str],
    births: Connection | None,
) -> None:
    prepare(environment, said, missing)
    if shown is not None:
        os.dup2(shown.fileno(), sys.stdout.fileno())
    if births is not None:
        from tests.forked_children import fork_children

        vars(multiprocessing.current_process())["_config"]["daemon"] = False  # or it might have no children
        fork_children(births, missing)
    run(module, arguments)


def prepare(environment: Mapping[str, str], said: Connection, missing: Sequence[str]) -> None:
    """In the process that was forked: `environment` is its own, it says what it says to `said`, and lacks modules."""
    os.environ.clear()
    os.environ.update(environment)  # a test may have set a folder for caches
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment]  # so an import of it fails
    os.dup2(said.fileno(), sys.stderr.fileno())


def run(module: str, arguments: list[str]) -> NoReturn:
    """In the process that was forked: the module's `main`."""
    sys.argv[1:] = arguments
    sys.exit(importlib.import_module(module).main())
