"""When and how a scheduler has been told to stop: by a signal, or by `Control.Drain`."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from octavo.shared.signals import on_signal, terminating


class Stopping:
    """SIGTERM, SIGHUP and `drain` let requests finish, one after the other as well; SIGINT, or SIGTERM twice, does not
    wait."""

    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._now = asyncio.Event()
        self._has_sigterm = False

    def listen(self) -> None:
        """Takes the signals of this process from now on."""
        on_signal(signal.SIGINT, self.stop)
        for number in terminating():
            on_signal(number, self._on_sigterm, number == signal.SIGHUP)

    def drain(self) -> None:
        """To stop once live requests have ended."""
        self._told.set()

    def stop(self) -> None:
        """To stop now."""
        self._told.set()
        self._now.set()

    async def told(self) -> None:
        """Returns when either has been called."""
        await self._told.wait()

    async def wait_no_longer(self, seconds: float) -> None:
        """Returns after so many seconds, or as soon as nothing is to be waited for any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._now.wait()

    @property
    def is_signalled(self) -> bool:
        """Whether it is this process that is to end."""
        return self._has_sigterm or self._now.is_set()

    @property
    def is_urgent(self) -> bool:
        """Whether live requests are not to be waited for."""
        return self._now.is_set()

    def _on_sigterm(self, is_hangup: bool) -> None:
        if self._has_sigterm and not is_hangup:  # which shell and kernel both send where a terminal ends
            self._now.set()
        self._has_sigterm = True
        self._told.set()
