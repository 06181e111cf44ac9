"""Children of a process that is forked (`tests.forkserver`), which are forked like it: instead of `start_child`.

They do not outlive it, read nothing and get no Ctrl-C, as `octavo.shared.processes.child_process` says. Only the
environment that is read at an import is not theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from tests import forkserver
from tests.forked_ranks import fork_ranks


def fork_children(births: Connection, missing: Sequence[str]) -> None:
    """From now on in this process. `births` is told what each runs, and its process id; see `ForkedCommand`."""
    from octavo.shared.processes import supervisor
    from scheduler_svc.frontends import kept_processes

    async def start_child(
        command: Sequence[str], environment: Mapping[str, str], stderr: int | None = None
    ) -> ForkedChild:
        assert command[:2] == [sys.executable, "-m"], "one that is not Python's"
        child = ForkedChild(command[2:], environment, 2 if stderr is None else stderr, missing)
        births.send((command[3] if command[2] == "octavo" else command[2], child.pid))
        return child

    for module in (supervisor, kept_processes):
        module.__dict__["start_child"] = start_child
    fork_ranks()
    # Or the first child would start a fork server anew: this process knows the address of the one that it came from.
    server = forkserver.forkserver._forkserver  # type: ignore[attr-defined]  # no stub has it
    server.__dict__["ensure_running"] = lambda: None


class ForkedChild:
    """What its keeper needs of an `asyncio.subprocess.Process`: a module that is run, with arguments."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], stderr: int, missing: Sequence[str]
    ) -> None:
        self.returncode: int | None = None
        with Connection(os.dup(stderr), readable=False) as said:
            given = list(arguments), dict(environment), said, missing
            self._process: BaseProcess = forkserver.CONTEXT.Process(target=_run, args=given)
            self._process.start()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._process.sentinel, self._on_end)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _on_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self.returncode = self._process.exitcode
        assert self.returncode is not None
        self._ended.set_result(self.returncode)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], environment: dict[str, str], said: Connection, missing: Sequence[str]) -> None:
    ends_with_parent()
    module, *options = arguments
    if module == "octavo":
        missing = () if options[0] == "worker" else forkserver.WITHOUT_TORCH
    forkserver.prepare(environment, said, missing)
    forkserver.run("octavo.cli" if module == "octavo" else module, options)


def ends_with_parent() -> None:
    """In the process that was forked, what the kernel does for a real child; and no Ctrl-C is meant for it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.setpgid(0, 0)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
