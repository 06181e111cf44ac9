"""`octavo worker` as a process that is up within a second (`tests.forkserver`), and says in a file what it does."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests import forkserver

START_S = 120.0


class WorkerProcess:
    """Started at once; `wait_until_ready` before use."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.log = log
        self.port = 0
        log.touch()
        forkserver.start()
        command = ["worker", "--port=0", *arguments]
        self._process: BaseProcess = forkserver.CONTEXT.Process(target=_run, args=(command, str(log)))
        self._process.start()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.is_ready():
            assert self._process.is_alive() and time.monotonic() < deadline, f"no worker: {self.log.read_text()}"
            time.sleep(0.02)

    def is_ready(self) -> bool:
        for line in self.log.read_text().splitlines():
            if line.startswith("{") and (event := json.loads(line))["event"] == "worker ready":
                self.port = int(event["address"].rpartition(":")[2])
        return bool(self.port)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_for_end(self) -> None:
        self._process.join(START_S)
        assert not self._process.is_alive(), f"it does not end: {self.log.read_text()}"

    def end(self) -> None:
        """However it is."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


def _run(arguments: list[str], log: str) -> None:
    with open(log, "a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
        forkserver.run("octavo.cli", arguments)
