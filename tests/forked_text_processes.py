"""Text processes of a frontend that is forked (`tests.forkserver`), which are forked like it: in place of a new
interpreter, of which each takes a third of a second of a core.

For what is asked of them. How they are started, and end with whoever started them, is shown with real ones: by
tests/scheduler/test_text_processes.py, and by schedulers that are not forked.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import process as multiprocessing_process
from multiprocessing.connection import Connection
from typing import cast

from octavo.shared.options import environment_without_options
from scheduler_svc.requests import text_processes
from scheduler_svc.requests.killable_process import KillableProcess
from tests import forkserver
from tests.forked_process import ForkedProcess, ends_with_parent


def fork_text_processes() -> None:
    """From now on in this process."""
    text_processes.__dict__["KillableProcess"] = _ForkedTextProcess


class _ForkedTextProcess(KillableProcess):
    """One that is not a child of this process, but of the fork server."""

    @classmethod
    async def start(cls, on_end: Callable[[], None]) -> KillableProcess:
        environment = {**environment_without_options(), "TOKENIZERS_PARALLELISM": "false"}
        process = await _TextProcess.start(environment)
        return cls(cast("asyncio.subprocess.Process", process), on_end)

    @property
    def has_ended(self) -> bool:
        if self._ended.done():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False


class _TextProcess(ForkedProcess):
    """What `KillableProcess` needs of an `asyncio.subprocess.Process`."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    @classmethod
    async def start(cls, environment: Mapping[str, str]) -> _TextProcess:
        (source, asked), (answered, sink) = os.pipe(), os.pipe()
        with (
            Connection(source, writable=False) as its_input,
            Connection(sink, readable=False) as its_output,
            Connection(os.dup(2), readable=False) as said,
        ):
            process = cls(_run, (dict(environment), its_input, its_output, said))
        multiprocessing_process.__dict__["_children"].discard(process.process)  # or this one's end waits for its end
        loop, process.stdout = asyncio.get_running_loop(), asyncio.StreamReader()
        reading = asyncio.StreamReaderProtocol(process.stdout)
        await loop.connect_read_pipe(lambda: reading, os.fdopen(answered, "rb", 0))
        transport, writing = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(asked, "wb", 0))
        process.stdin = asyncio.StreamWriter(transport, writing, None, loop)
        return process


def _run(environment: Mapping[str, str], its_input: Connection, its_output: Connection, said: Connection) -> None:
    ends_with_parent()
    forkserver.prepare(environment, said, forkserver.WITHOUT_TORCH)
    os.dup2(its_input.fileno(), 0)
    os.dup2(its_output.fileno(), sys.stdout.fileno())
    for each in (its_input, its_output):
        each.close()
    sys.stdin = os.fdopen(0)
    forkserver.run("scheduler_svc.requests.text_process", [])
