"""Ways to answer: JSON in one piece or in several, an error, a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.types import Receive, Send

from gateway_svc.errors import HttpError
from gateway_svc.http.bodies import ClientGone

_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)
_COMMENT = b": keep-alive\n\n"  # that readers of events drop
_PIECE_CHARS = 65_536  # of a long answer that are made and written at a time


async def send_json(send: Send, value: Any, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
    """A short answer in one piece."""
    await _send_whole(send, json.dumps(value, separators=(",", ":")).encode("ascii"), status, headers)


async def send_error(send: Send, error: HttpError) -> None:
    """An error, as OpenAI's clients read it."""
    await send_json(send, error.body(), error.status, error.headers)


async def send_parts(send: Send, parts: Iterator[str], headers: Mapping[str, str]) -> None:
    """An answer of any length, made as it is written: others have their turn, and a slow reader's waits."""
    held: list[str] = []
    num_chars, is_begun = 0, False
    for part in parts:
        held.append(part)
        num_chars += len(part)
        if num_chars >= _PIECE_CHARS:
            if not is_begun:
                is_begun = True
                await _start(send, 200, (_JSON,), headers.items())
            await send({"type": "http.response.body", "body": "".join(held).encode("ascii"), "more_body": True})
            await asyncio.sleep(0)
            held, num_chars = [], 0
    body = "".join(held).encode("ascii")
    if is_begun:
        await send({"type": "http.response.body", "body": body, "more_body": False})
    else:
        await _send_whole(send, body, 200, headers.items())


class EventStream:
    """A stream of events. `is_begun`: the status has been sent, and can be no other any more."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send, self._headers = send, headers
        self._now_s = asyncio.get_running_loop().time
        self._written_s = self._now_s()  # the last time
        self.is_begun = False

    async def begin(self) -> None:
        """Sends the status, which is 200."""
        self.is_begun = True
        self._written_s = self._now_s()
        await _start(self._send, 200, _EVENTS, self._headers.items())

    async def write(self, events: bytes) -> None:
        """Returns when there is room for more: a slow reader's tokens wait where they are made."""
        self._written_s = self._now_s()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    @asynccontextmanager
    async def kept_alive(self, silence_s: float) -> AsyncIterator[None]:
        """After so long without an event a comment is written, so that no proxy takes the stream for dead; 0: never."""
        filling = asyncio.create_task(self._fill_silence(silence_s)) if silence_s else None
        try:
            yield
        finally:
            if filling is not None:
                filling.cancel()

    async def _fill_silence(self, silence_s: float) -> None:
        while True:
            left_s = self._written_s + silence_s - self._now_s()
            if left_s > 0:
                await asyncio.sleep(left_s)
            elif self.is_begun:
                await self.write(_COMMENT)
            else:  # nothing may be written before the status
                self._written_s = self._now_s()

    async def end(self, events: bytes) -> None:
        """The last events, and the end."""
        await self._send({"type": "http.response.body", "body": events, "more_body": False})


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Ends what is done in it when the client goes. Raises ClientGone."""
    task = asyncio.current_task()
    assert task is not None
    is_gone = is_over = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not is_over:
            is_gone = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        is_over = True
        watcher.cancel()
    if is_gone:  # and nothing was waited for since
        task.uncancel()
        await _take_cancellation()
        raise ClientGone


async def _take_cancellation() -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


async def _send_whole(send: Send, body: bytes, status: int, headers: Iterable[tuple[str, str]]) -> None:
    await _start(send, status, (_JSON, (b"content-length", str(len(body)).encode())), headers)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _start(send: Send, status: int, own: Iterable[tuple[bytes, bytes]], more: Iterable[tuple[str, str]]) -> None:
    headers = [*own, *((name.encode("ascii"), value.encode("ascii")) for name, value in more)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
