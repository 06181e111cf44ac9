"""Reads adapters beside the event loop, a few at a time, on threads that a process can end under."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from worker_svc.adapters.adapter_folder import Adapter
from worker_svc.adapters.errors import AdapterError
from worker_svc.host.model_thread import ModelThread

AT_ONCE = 4  # each may be some hundred MB
SLOW_S = 10.0  # after which a read keeps no other waiting: its disk may be one that never answers


class AdapterReads:
    """For one event loop. `most`: reads that have not ended, whoever still waits for them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reads: set[Future[Adapter]] = set()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def read(self, read: Callable[[], Adapter]) -> Adapter:
        """What `read` returns. Raises what that does, and AdapterError where too many have not ended."""
        async with self._places:
            self._reads = {each for each in self._reads if not each.done()}
            if len(self._reads) >= self._most:
                raise AdapterError(f"{self._most} adapters are being read already, and their disks do not answer")
            thread = ModelThread("adapter")
            future = thread.call(read)
            thread.stop(timeout_s=0.0)  # when it has read
            self._reads.add(future)
            reading = asyncio.wrap_future(future)
            reading.add_done_callback(_see)
            await asyncio.wait([reading], timeout=SLOW_S)
        return await reading


def _see(reading: asyncio.Future[Adapter]) -> None:
    """Of a read whose caller has given up, asyncio would complain that nobody has looked at its error."""
    if not reading.cancelled():
        reading.exception()
