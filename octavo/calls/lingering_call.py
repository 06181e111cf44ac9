"""A call that is given up no sooner than a while after it began, though whoever wanted it has left.

A scheduler cuts a connection on which many calls are begun and given up at once (`scheduler_svc.api.open_calls`). Over
the connection of a client that passes on what others ask go the requests of all of them: one of these is not to have it
cut. A call that is refused or answered meanwhile has ended by itself.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

LEAST_S = 0.5  # schedulers take less than 0.25 s for no use; the rest is for the way there


class LingeringCall:
    """The messages of a call of grpc.aio that is answered by a stream. For one event loop.

    grpc.aio cancels a call whose reader is cancelled: so it is read by a task of its own, as long as it may not end.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages = aiter(call)
        self._loop = asyncio.get_running_loop()
        self._may_end_s = self._loop.time() + LEAST_S

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Raises grpc.RpcError."""
        if self._loop.time() >= self._may_end_s:
            return await anext(self._messages)
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(_hear)
        if (message := await asyncio.shield(reading)) is None:
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        """Returns at once; who still reads hears of it when the call ends."""
        if self._call.done():
            return
        if (left_s := self._may_end_s - self._loop.time()) > 0:
            self._loop.call_later(left_s, self._call.cancel)
        else:
            self._call.cancel()

    async def _read(self) -> Any:
        return await anext(self._messages, None)


def _hear(reading: asyncio.Task[Any]) -> None:
    """What it failed with is told to nobody, where nobody waits for it any more."""
    if not reading.cancelled():
        reading.exception()
