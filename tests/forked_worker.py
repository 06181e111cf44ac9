"""The worker beside an `LLM`, forked: for tests of what an engine does, not of how its worker is started.

pytestmark = pytest.mark.usefixtures("forked_workers")
"""

from __future__ import annotations

import os
import subprocess
from typing import cast

from octavo.embedded.worker_process import WorkerProcess
from tests.forkserver import ForkedCommand


class _ForkedWorker(ForkedCommand):
    """What `WorkerProcess` needs of a `subprocess.Popen`: its errors through a pipe."""

    def __init__(self, arguments: list[str]) -> None:
        reader, writer = os.pipe()
        self.stderr = os.fdopen(reader, "rb")
        try:
            super().__init__(arguments, writer)
        finally:
            os.close(writer)


def fork(worker: WorkerProcess) -> subprocess.Popen[bytes]:
    """In the place of `WorkerProcess._open`. With one thread unless it was told how many: two that wait for one another
    take twice the processor time, and a test that is about threads names them."""
    arguments = worker._command[worker._command.index("worker") :]
    if not any(argument.startswith("--num-threads") for argument in arguments):
        arguments = [*arguments, "--num-threads=1"]
    return cast("subprocess.Popen[bytes]", _ForkedWorker(arguments))
