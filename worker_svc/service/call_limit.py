"""How many calls of one kind may be open at once: every waiting call costs memory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import NoReturn

import grpc


class CallLimit:
    """For one event loop. A call beyond the limit is refused at once; its sender may try again."""

    def __init__(self, what: str, most: int) -> None:
        """`what` calls of this kind are, in the plural, for the message."""
        self._what, self._most = what, most
        self._num_calls = 0

    @contextlib.asynccontextmanager
    async def admit(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Takes a place during the `with` block. Aborts `context` with RESOURCE_EXHAUSTED when none is free."""
        if self._num_calls >= self._most:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {self._most} {self._what} already")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1


async def refuse(context: grpc.aio.ServicerContext, code: grpc.StatusCode, why: str) -> NoReturn:
    """Ends a call with a status."""
    await context.abort(code, why)
    raise AssertionError("abort has raised")
