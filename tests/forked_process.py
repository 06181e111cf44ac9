"""What is forked by a process that is itself forked (`tests.forkserver`), as its event loop knows it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from typing import Any

from tests import forkserver


class ForkedProcess:
    """What its keeper needs of an `asyncio.subprocess.Process`: a function that is run, with arguments."""

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.returncode: int | None = None
        self.process: BaseProcess = forkserver.CONTEXT.Process(target=target, args=arguments)
        self.process.start()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self.process.sentinel, self._on_end)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _on_end(self) -> None:
        self._loop.remove_reader(self.process.sentinel)
        self.process.join()
        self.returncode = self.process.exitcode
        assert self.returncode is not None
        self._ended.set_result(self.returncode)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def ends_with_parent() -> None:
    """In the process that was forked, what the kernel does for a real child; and no Ctrl-C is meant for it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.setpgid(0, 0)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
