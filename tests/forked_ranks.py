"""The further ranks of a forked worker (`tests.forkserver`), which are forked like it: in place of `subprocess.Popen`.

For what ranks compute. How they are started, and end with one another, tests of parallel groups show with real ones.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from tests import forkserver


def fork_ranks() -> None:
    """From now on in this process."""
    from worker_svc.parallel import started_ranks

    names = {"Popen": ForkedRank, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    started_ranks.__dict__["subprocess"] = SimpleNamespace(**names)


class ForkedRank:
    """What `StartedRanks` needs of a process; of the command its options are run."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> None:
        self._arguments = list(command[command.index("worker") :])
        shared = [Connection(os.dup(number), writable=False) for number in pass_fds]  # which only carry descriptors
        said = Connection(os.dup(2), readable=False)
        given = self._arguments, dict(env), said, shared
        self._process = forkserver.CONTEXT.Process(target=_run, args=given)
        self._process.start()
        for each in (said, *shared):
            each.close()
        self._one_at_a_time = threading.Lock()  # the exit code can be read once

    def wait(self, timeout: float | None = None) -> int:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._arguments, timeout or 0.0)
        with self._one_at_a_time:
            self._process.join()
            assert self._process.exitcode is not None
            return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(arguments: list[str], environment: dict[str, str], said: Connection, shared: list[Connection]) -> None:
    from tests.forked_process import ends_with_parent
    from worker_svc.parallel.started_ranks import CHANNEL

    ends_with_parent()
    environment[CHANNEL] = ",".join(str(each.fileno()) for each in shared)
    forkserver.prepare(environment, said, ())
    forkserver.run("octavo.cli", arguments)
