"""Connections with bounds that uvicorn does not set: their number, what a request may have, and how long all may take.

A connection that is idle makes room for one that is not, as does one whose request is not wholly here. A request has
to be here within a time, from its first byte (or the connection's begin) to the end of its body. A client that reads
nothing of its answer for long is cut off.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway_svc.answers.json_text import text_of
from gateway_svc.errors import HttpError
from octavo.shared.few_lines import FewLines

log = structlog.get_logger()

MAX_BEHIND = 8  # requests of a connection that wait for the answer of another
MAX_HEAD_BYTES = 65_536  # also of what stands at one place of a chunked body: chunks' sizes and extensions, trailers
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class Bounds:
    """Of all connections of a process; options of the command."""

    def __init__(self, max_connections: int, read_timeout_s: float, write_timeout_s: float) -> None:
        self.max_connections = max_connections
        self.read_timeout_s, self.write_timeout_s = read_timeout_s, write_timeout_s
        self.strangers = FewLines()
        self.connections: dict[BoundedProtocol, None] = {}  # the oldest first


def bounded(bounds: Bounds) -> type[HttpToolsProtocol]:
    """The class of connections that keep to them."""

    class Bounded(BoundedProtocol):
        pass

    Bounded.bounds = bounds
    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    bounds: Bounds

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None  # of the request that is being read
        self._stall: asyncio.TimerHandle | None = None
        self._num_other_bytes = 0  # that came since a request, or a piece of its body, began
        self._in_head = True
        self._running: Any = None  # the cycle that is being answered; `cycle` is the last one that was read

    @property
    def is_idle(self) -> bool:
        """Nothing is being answered."""
        return self._running is None or self._running.response_complete

    @property
    def is_answering(self) -> bool:
        """A request that is wholly here is being answered."""
        return not self.is_idle and not self._running.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Makes room for it, or does without."""
        super().connection_made(transport)
        self.bounds.connections[self] = None
        if len(self.connections) > self.bounds.max_connections and not self._make_room():
            transport.abort()
            return
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what is being answered, also where more requests stand behind it."""
        self._cancel_timers()
        self.bounds.connections.pop(self, None)
        if (running := self._running) is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True  # requests behind it came over the same connection
            running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Refuses a head and trailers that do not end, and overlooks an offer to speak another protocol."""
        if self._num_other_bytes > MAX_HEAD_BYTES:
            what = "head of the request is" if self._in_head else "trailers of the request are"
            self.send_400_response(f"The {what} too large.")
        if not self.transport.is_closing():
            self._num_other_bytes += len(data)
            self._parse(_without_offer(data) if self._in_head else data)

    def send_400_response(self, msg: str) -> None:
        """For what is no request, as OpenAI's clients read it, unless it came behind one that is being answered."""
        if self.is_idle or not self._running.response_started:
            body = text_of(HttpError(400, msg).body()).encode("ascii")
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
            self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n\r\n".encode("ascii") + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        """A request begins. Raises ValueError, which ends the connection, where too many are behind the answered one:
        all of a reading is parsed at once, and each of them is some kilobytes here."""
        if len(self.pipeline) >= MAX_BEHIND:
            raise ValueError(f"more than {MAX_BEHIND} requests wait for the answer of another")
        super().on_message_begin()
        self._in_head, self._num_other_bytes = True, 0
        if self._deadline is None:
            self._expect_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its head. Trailers are dropped: uvicorn would add them to the head, which is being answered."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is here."""
        self._in_head, self._num_other_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of its body is here."""
        self._num_other_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is here."""
        self._in_head, self._num_other_bytes = True, 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.bounds.write_timeout_s, self._stalled)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _parse(self, data: bytes) -> None:
        """As uvicorn does, which logs a line for each stranger."""
        self._unset_keepalive_if_required()
        if self._deadline is None and self.is_idle:  # an empty line before a request begins none
            self._expect_request()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.bounds.strangers.write(log.warning, "what came is no request of HTTP", client=self.client)
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade:
            self.bounds.strangers.write(log.warning, "no other protocol is spoken here", client=self.client)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(self.bounds.read_timeout_s, self._too_late)

    def _too_late(self) -> None:
        self._deadline = None
        if self.is_answering:  # while another request is begun, which nobody may have read
            self._expect_request()
        else:
            self.transport.abort()

    def _stalled(self) -> None:
        log.info("a client reads nothing of its answer and is cut off", after_s=self.bounds.write_timeout_s)
        self._stall = None
        self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        self._deadline = self._stall = None

    def _make_room(self) -> bool:
        """Closes the oldest connection on which nothing is asked, or else of those whose request is not wholly here, if
        there is one."""
        given_up = self._first_other(lambda each: each.is_idle) or self._first_other(lambda each: not each.is_answering)
        if given_up is not None:
            given_up.transport.abort()
        return given_up is not None

    def _first_other(self, may_end: Callable[[BoundedProtocol], bool]) -> BoundedProtocol | None:
        for each in self.bounds.connections:
            if each is not self and not each.transport.is_closing() and may_end(each):
                return each
        return None


def _without_offer(data: bytes) -> bytes:
    """Java's client offers HTTP/2 in the head of its first request, and httptools takes the body for that, unread."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head) + end + rest
