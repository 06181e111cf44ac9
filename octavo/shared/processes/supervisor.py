"""Child processes that live and die together: what `octavo serve` is made of.

All start at once. One that ends before all are ready, or one that is essential, ends the rest; others are started
again, with growing pauses, and given up after too many ends in a row. No child outlives the supervisor: on a signal
they are ended in order, and on Linux the kernel ends them when the supervisor itself is killed. Knows nothing of what
they do. A service whose helpers must never end it keeps them by rules of its own, with the same `child_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from octavo.shared.processes.child_output import ChildOutput, Screen, environment
from octavo.shared.processes.child_process import Restarts, start_child
from octavo.shared.signals import on_signal, terminating

log = structlog.get_logger()

INTERRUPTED, BAD_USAGE = 130, 2
_GRACE_S = {True: 2.5, False: 2.2}  # those that end first, then workers, which give their ranks 2 s; below 5 s together
_LAST_WORDS_S, _READ_BYTES = 1.0, 1 << 16
_MAX_RESTARTS = 5  # in a row; a life of _GOOD_LIFE_S makes up for all earlier ends
_GOOD_LIFE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0


@dataclass(frozen=True)
class Child:
    """What to start. An `essential` child's end is the end of all, a good one if its exit code is 0; any other child is
    started again.

    `is_front`: stands before the essential ones, and is ended when they are; without it there is nothing to serve, but
    its end is no end of what others have begun.
    `drain_s`: how long it may take to end after SIGTERM, beyond what any child gets; SIGINT is to end it at once.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    essential: bool
    drain_s: float = 0.0
    is_front: bool = False

    @property
    def ends_first(self) -> bool:
        """Before those that do what it asks for."""
        return self.essential or self.is_front


@dataclass
class _Life:
    """One child and its current process."""

    child: Child
    output: ChildOutput
    restarts: Restarts
    process: asyncio.subprocess.Process | None = None
    given_up: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs children until told to stop. `run` returns the exit code for the whole."""

    def __init__(self, children: Sequence[Child], wait_until_ready: Callable[[], Coroutine[Any, Any, None]]) -> None:
        screen = Screen()
        pauses = _FIRST_PAUSE_S, _LONGEST_PAUSE_S, _GOOD_LIFE_S
        self._lives = [_Life(child, ChildOutput(screen), Restarts(*pauses)) for child in children]
        self._wait_until_ready = wait_until_ready
        self._is_ready = False
        self._stopping = False
        self._exit_code: asyncio.Future[int] | None = None
        self.reason = ""  # one line: which child's end was the reason for all, and what it said last

    async def run(self, when_ready: Callable[[float], None]) -> int:
        """Starts everything, calls `when_ready` with the seconds that took, and returns when all has ended.

        0 after SIGTERM or SIGHUP, 130 after SIGINT; when a child's end was the reason: 2 where the child has
        refused its options, otherwise 1.
        """
        started_s = time.monotonic()
        loop = asyncio.get_running_loop()
        self._exit_code = loop.create_future()
        on_signal(signal.SIGINT, self._on_signal, INTERRUPTED)
        for number in terminating():
            on_signal(number, self._on_signal, 0, number == signal.SIGHUP)
        keepers = [asyncio.create_task(self._keep(life)) for life in self._lives]
        for keeper in keepers:
            keeper.add_done_callback(self._on_keeper_ended)
        readiness = asyncio.create_task(self._wait_until_ready())
        try:
            either: list[asyncio.Future[Any]] = [readiness, self._exit_code]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._exit_code.done():
                readiness.result()
                self._is_ready = True
                when_ready(time.monotonic() - started_s)
            return await self._exit_code
        finally:
            self._stopping = True
            readiness.cancel()
            await self._stop_all(is_urgent=self._exit_code.done() and self._exit_code.result() == INTERRUPTED)
            for task in keepers:
                task.cancel()
            await asyncio.gather(*keepers, readiness, return_exceptions=True)

    def _on_signal(self, code: int, is_hangup: bool = False) -> None:
        if self._stopping and not is_hangup:  # the user insists; shell and kernel both tell of a terminal's end
            for life in self._lives:
                _send(life, signal.SIGKILL)
        self._end_with(code)

    def _end_with(self, code: int, reason: str = "") -> None:
        assert self._exit_code is not None
        if not self._exit_code.done():
            self._exit_code.set_result(code)
            self.reason = reason

    def _on_keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """A child that cannot even be started, or an error in this code, must not leave a caller waiting."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            log.error("a child cannot be kept", exc_info=error)
            self._end_with(1, f"a child cannot be kept: {type(error).__name__}: {error}")

    async def _keep(self, life: _Life) -> None:
        """Starts a child, and again after each end, for as long as that makes sense."""
        while self._exit_code is not None and not self._exit_code.done():
            life.ended.clear()
            life.restarts.started()
            life.process, pipe = await _start(life.child)
            code = await _pass_on(life.process, pipe, life.output)
            life.ended.set()
            if self._stopping:
                return
            if life.child.essential and code == 0:
                log.info("ending, as was asked of a child", child=life.child.name, pid=life.process.pid)
                self._end_with(0)
                return
            log.error("a child has ended", child=life.child.name, pid=life.process.pid, **_describe(code))
            if life.child.essential or not self._is_ready:
                self._end_with(BAD_USAGE if code == BAD_USAGE else 1, _why(life, code))
                return
            life.restarts.ended()
            if life.restarts.count == _MAX_RESTARTS:
                self._give_up(life, code)
                return
            pause_s, count = life.restarts.pause_s(), life.restarts.count
            log.info("starting it again", child=life.child.name, in_s=pause_s, restart=count, of=_MAX_RESTARTS)
            await asyncio.sleep(pause_s)

    def _give_up(self, life: _Life, code: int) -> None:
        life.given_up = True
        log.error("not starting it again", child=life.child.name, restarts=life.restarts.count)
        if life.child.is_front or all(other.given_up for other in self._lives if not other.child.ends_first):
            self._end_with(1, _why(life, code))

    async def _stop_all(self, is_urgent: bool) -> None:
        """Those that end first, then the rest, each group with its grace; SIGKILL to those that remain."""
        for ends_first in (True, False):
            group = [life for life in self._lives if life.child.ends_first is ends_first and _is_alive(life)]
            for life in group:
                _send(life, signal.SIGINT if is_urgent else signal.SIGTERM)
            drain_s = 0.0 if is_urgent else max((life.child.drain_s for life in group), default=0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S[ends_first] + drain_s):
                    for life in group:
                        await life.ended.wait()
            for life in group:
                if _is_alive(life):
                    log.warning("ending it by force", child=life.child.name)
                    _send(life, signal.SIGKILL)
        for life in self._lives:
            if _is_alive(life):
                await life.ended.wait()


async def _start(child: Child) -> tuple[asyncio.subprocess.Process, _Pipe]:
    """The process, and what it writes to standard error.

    Through a pipe of ours: with one of its own asyncio would not say that it has ended before all who hold that pipe
    have, and a child of the child may.
    """
    pipe, written_to = await _Pipe.open()
    try:
        process = await start_child(child.command, {**child.environment, **environment()}, stderr=written_to)
    except BaseException:
        pipe.transport.close()
        raise
    finally:
        os.close(written_to)
    return process, pipe


@dataclass(frozen=True)
class _Pipe:
    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport

    @classmethod
    async def open(cls) -> tuple[_Pipe, int]:
        """And the file descriptor of its other end."""
        read_from, written_to = os.pipe()
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(read_from, "rb"))
        return cls(reader, transport), written_to


async def _pass_on(process: asyncio.subprocess.Process, pipe: _Pipe, output: ChildOutput) -> int:
    """Passes on what the child says until it has ended; its exit code."""

    async def read() -> None:
        while data := await pipe.reader.read(_READ_BYTES):
            output.take(data)
        output.take(b"")

    reading = asyncio.create_task(read())
    try:
        code = await process.wait()
        await asyncio.wait([reading], timeout=_LAST_WORDS_S)  # a child of the child may hold the pipe for longer
    finally:
        reading.cancel()
        pipe.transport.close()
    return code


def _why(life: _Life, code: int) -> str:
    """One line for the user."""
    name = life.child.name
    if code >= 0:
        return f"the {name} has ended with exit code {code}: {life.output.reason or 'it said nothing'}"
    number = signal.Signals(-code)
    hint = ", as the system does when memory runs out" if number is signal.SIGKILL else ""
    return f"the {name} was ended by {number.name}{hint}"


def _is_alive(life: _Life) -> bool:
    return life.process is not None and life.process.returncode is None


def _send(life: _Life, number: signal.Signals) -> None:
    if life.process is not None and _is_alive(life):
        with contextlib.suppress(ProcessLookupError):
            life.process.send_signal(number)


def _describe(code: int) -> dict[str, int | str]:
    return {"exit_code": code} if code >= 0 else {"signal": signal.Signals(-code).name}
