"""Child processes of one command that are started again, whatever ends them, until they are told to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from octavo.end_with_parent import ends_with_parent
from octavo.options import environment_without_options
from scheduler_svc.public_server import GRACE_S
from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
GOOD_LIFE_S = 30.0  # makes up for all earlier ends
STOP_GRACE_S = GRACE_S + 0.3  # what a frontend's clients have, and its own end


class FrontendProcesses:
    """They end by themselves when the core closes their link; `stop` waits for that."""

    def __init__(self, command: Sequence[str], count: int, vital: VitalParts) -> None:
        self._command = list(command)
        self._count = count
        self._vital = vital
        self._keepers: list[asyncio.Task[None]] = []
        self._running: set[asyncio.subprocess.Process] = set()
        self._is_stopping = False

    def start(self) -> None:
        self._keepers = [
            self._vital.task(f"keeper of frontend {number}", self._keep(), lambda: self._is_stopping)
            for number in range(self._count)
        ]

    async def stop(self) -> None:
        """To be called when their links are closed. Who does not end in time is killed."""
        self._is_stopping = True
        waits = [asyncio.create_task(process.wait()) for process in self._running]
        if waits:
            await asyncio.wait(waits, timeout=STOP_GRACE_S)
        for process in self._running:
            if process.returncode is None:
                log.warning("ending a frontend by force", pid=process.pid)
                process.kill()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, *waits, return_exceptions=True)

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            started_s = time.monotonic()
            try:
                process = await self._start()
            except OSError as error:  # no memory for another process, or no descriptors; there may be later
                log.error("a frontend cannot be started; trying again", why=str(error), in_s=pause_s)
            else:
                self._running.add(process)
                code = await process.wait()
                self._running.discard(process)
                if self._is_stopping:
                    return
                if time.monotonic() - started_s > GOOD_LIFE_S:
                    pause_s = FIRST_PAUSE_S
                log.error("a frontend has ended; starting it again", pid=process.pid, exit_code=code, in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *ends_with_parent(self._command),
            env=environment_without_options(),
            stdin=asyncio.subprocess.DEVNULL,
            process_group=0,  # Ctrl-C at the terminal reaches the core alone, which then ends them in order
        )
