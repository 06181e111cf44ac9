"""Frontends and shards of a scheduler: child processes of one kind, started again for ever, whatever ends them.

Not `octavo.shared.processes.supervisor`, which is the whole of `octavo serve`: there one end may end all, who fails too
often is given up, output and signals are its own, and children end on SIGTERM. Here the scheduler goes on serving
whatever its children do, and they end with their link to it. How a child is started, and the pauses, are the same code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from octavo.shared.options import environment_without_options
from octavo.shared.processes.child_process import Restarts, start_child
from scheduler_svc.api.public_server import GRACE_S
from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
GOOD_LIFE_S = 30.0  # makes up for all earlier ends
STOP_GRACE_S = GRACE_S + 0.3  # what a frontend's clients have, and its own end


class KeptProcesses:
    """They end by themselves when their link to this process is closed; `stop` waits for that.

    Args:
        kind: what one of them is, for the log.
        command: gives that of the process with a number, each time that it is started.
    """

    def __init__(
        self,
        kind: str,
        command: Callable[[int], Sequence[str]],
        count: int,
        vital: VitalParts,
    ) -> None:
        self._kind = kind
        self._command = command
        self._count = count
        self._vital = vital
        self._keepers: list[asyncio.Task[None]] = []
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._is_stopping = False

    def start(self) -> None:
        """Starts all of them, on the running event loop."""
        self._keepers = [
            self._vital.task(f"keeper of {self._kind} {number}", self._keep(number), lambda: self._is_stopping)
            for number in range(self._count)
        ]

    def kill(self, number: int) -> None:
        """Ends one at once, if it runs; another one is started in its place."""
        if (process := self._running.get(number)) is not None and process.returncode is None:
            process.kill()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """To be called when their links are closed. Who does not end in time is killed."""
        self._is_stopping = True
        waits = [asyncio.create_task(process.wait()) for process in self._running.values()]
        if waits:
            await asyncio.wait(waits, timeout=grace_s)
        for process in self._running.values():
            if process.returncode is None:
                log.warning("ending it by force", kind=self._kind, pid=process.pid)
                process.kill()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, *waits, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        restarts = Restarts(FIRST_PAUSE_S, LONGEST_PAUSE_S, GOOD_LIFE_S)
        while True:
            restarts.started()
            try:
                process = await start_child(self._command(number), environment_without_options())
            except OSError as error:  # no memory for another process, or no descriptors; there may be later
                pause_s = restarts.pause_s()
                log.error("a process cannot be started; trying again", kind=self._kind, why=str(error), in_s=pause_s)
            else:
                self._running[number] = process
                code = await process.wait()
                del self._running[number]
                if self._is_stopping:
                    return
                restarts.ended()
                pause_s = restarts.pause_s()
                what = f"a {self._kind} has ended; starting it again"
                log.error(what, number=number, pid=process.pid, exit_code=code, in_s=pause_s)
            await asyncio.sleep(pause_s)
