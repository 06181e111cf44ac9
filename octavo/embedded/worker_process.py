"""The worker beside an `LLM`: a child process on a free port of loopback, which does not outlive its parent.

Any user of the machine can reach that port, so the worker wants a token, as those of `octavo serve` do.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import WorkerEnded
from octavo.serving.links import new_token
from octavo.serving.plan import worker_environment
from octavo.shared.cores import available_cores
from octavo.shared.options import to_arguments
from octavo.shared.ports import LOOPBACK, free_port
from octavo.shared.processes.child_output import ChildOutput, Screen, environment
from octavo.shared.processes.end_with_parent import ends_with_parent
from octavo.shared.processes.module_command import module_command

if TYPE_CHECKING:
    from worker_svc.config import WorkerConfig

STOP_TIMEOUT_S = 5.0
_POLL_S = 0.001


class WorkerProcess:
    """Starts `octavo worker` with these options, whatever host, port and token they name.

    Attributes:
        address: of the worker.
        token_file: what its caller has to bring; gone after `stop`.
    """

    def __init__(self, config: WorkerConfig) -> None:
        port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-llm-"))  # which nobody else can enter
        self.token_file = new_token(self._folder)
        config = dataclasses.replace(config, host=LOOPBACK, port=port, token_file=self.token_file)
        self.address = f"{LOOPBACK}:{config.port}"
        self._command = module_command("octavo", "worker", *to_arguments(config))
        self._output = ChildOutput(Screen())
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        # A thread of its own: the kernel ends a child with the thread that started it, and the caller's may end early.
        self._thread = threading.Thread(target=self._run, name="worker-process", daemon=True)
        self._thread.start()
        try:
            self._wait_until_started()
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raises WorkerEnded with what the worker said last when it has ended."""
        if self._process is None or self._process.poll() is not None:
            self._thread.join()
            code = self._process.returncode if self._process else None
            said = self._output.reason or "it said nothing"
            raise WorkerEnded(f"the worker has ended with exit code {code}: {said}")

    def peak_bytes(self) -> int:
        """The most memory that the worker has had at once since it measured its first steps; 0 if unknown."""
        try:
            status = Path(f"/proc/{self._process.pid if self._process else 0}/status").read_text(encoding="ascii")
        except OSError:
            return 0
        return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), 0)

    def stop(self) -> None:
        """Ends the process, by force after STOP_TIMEOUT_S, and removes the token; a second time does nothing."""
        self._wait_until_started()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_started(self) -> None:
        # Not `Event.wait`: Ctrl-C may come while that has the event's lock, which nobody would ever have again.
        while not self._started.is_set():
            time.sleep(_POLL_S)

    def _open(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ends_with_parent(self._command),
            env=worker_environment(available_cores()) | environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the caller, who then stops the worker
        )

    def _run(self) -> None:
        try:
            self._process = self._open()
        finally:
            self._started.set()
        assert self._process.stderr is not None
        while data := self._process.stderr.read1():  # type: ignore[attr-defined]  # of a BufferedReader
            self._output.take(data)
        self._output.take(b"")
        self._process.wait()
