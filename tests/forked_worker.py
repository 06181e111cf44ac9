"""The worker beside an `LLM`, forked: for tests of what an engine does, not of how its worker is started.

pytestmark = pytest.mark.usefixtures("forked_workers")
"""

from __future__ import annotations

import os
import subprocess
import threading
from multiprocessing.connection import Connection
from typing import cast

from octavo.worker_process import WorkerProcess
from tests import forkserver


class ForkedProcess:
    """What `WorkerProcess` needs of a `subprocess.Popen`."""

    def __init__(self, arguments: list[str]) -> None:
        forkserver.start()
        reader, writer = forkserver.CONTEXT.Pipe(duplex=False)
        with reader, writer:
            self._process = forkserver.CONTEXT.Process(
                target=_run, args=(arguments, dict(os.environ), writer), daemon=True
            )
            self._process.start()
            self.stderr = os.fdopen(os.dup(reader.fileno()), "rb")
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
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def fork(worker: WorkerProcess) -> subprocess.Popen[bytes]:
    """In the place of `WorkerProcess._open`."""
    command = worker._command
    return cast("subprocess.Popen[bytes]", ForkedProcess(command[command.index("worker") :]))


def _run(arguments: list[str], environment: dict[str, str], stderr: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)  # a test may have set a folder for caches
    forkserver.run_command(arguments, stderr.fileno())
