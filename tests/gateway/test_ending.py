"""What tells a gateway to end, and how much it waits for then."""

from __future__ import annotations

import asyncio
import os
import signal

from gateway_svc.http.bounded_protocol import Bounds
from gateway_svc.server import _Server


async def test_the_end_of_a_terminal_lets_requests_finish_also_where_it_is_told_twice() -> None:
    async def never(scope: object, receive: object, send: object) -> None:
        raise AssertionError("nobody asks")

    server = _Server(never, Bounds(max_connections=4, read_timeout_s=1.0, write_timeout_s=1.0), None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with server.capture_signals():
            for number, ends, ends_now in (
                (signal.SIGHUP, True, False),
                (signal.SIGHUP, True, False),
                (signal.SIGTERM, True, True),
            ):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.05)
                assert (server.should_exit, server.force_exit) == (ends, ends_now)
    finally:
        for number, handler in before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)
